"""From the arguments of a layer's forward call to what its rule sees: tensors with the batch axis in front."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Axis = int | None
"""Where a tensor has its batch axis; `None`: it has none, all samples share it."""


@dataclass(slots=True)
class Binding:
    """How one forward call is seen by a rule.

    `options` carries the hyperparameters, `inputs` the tensors that the layer was given, `axes` their batch axes,
    `out_axes` those of the results (left out: axis 0 everywhere). A `problem` says why the rule cannot serve
    the call, and `do` what to write instead. The axes of a layer are `certain` to be those of samples; those of a
    function that looks at the last ones alone are not.
    """

    options: Any
    inputs: tuple[Tensor, ...]
    axes: tuple[Axis, ...] = ()
    out_axes: tuple[int, ...] = ()
    problem: str = ""
    do: str = "use one of the outputs only, or a first-order extension."
    certain: bool = True

    def axis(self, index: int) -> Axis:
        """The batch axis of an input."""
        return self.axes[index] if self.axes else 0

    def out_axis(self, number: int) -> int:
        """The batch axis of a result."""
        return self.out_axes[number] if self.out_axes else 0

    def seen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inputs as the rule sees them: batch axis in front, what is shared repeated (as a view)."""
        n = next((x.shape[a] for k, x in enumerate(tensors) if (a := self.axis(k)) is not None and x.dim()), 1)
        return [in_front(x, self.axis(k), n) for k, x in enumerate(tensors)]


class Binder(Protocol):
    """What knows how a layer's arguments and results are seen: a rule."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        """From the arguments of a forward call to tensors, options and batch axes."""

    def join(
        self, binding: Binding, results: Sequence[Tensor] | Mapping[int, Tensor], used: Sequence[int]
    ) -> tuple[Tensor, dict[int, torch.Size]]:
        """The results that matter as one output, and their shapes."""


@dataclass(frozen=True)
class WithArguments:
    """A module together with the arguments of one call that are no tensors."""

    module: nn.Module
    arguments: Mapping[Any, Any] = field(default_factory=dict)


PLAIN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Parameters of functions that take one argument each."""

SIGNATURES: WeakKeyDictionary[type[nn.Module], dict[str, Any] | None] = WeakKeyDictionary()
"""Of the forward passes of classes, the names of the arguments, with their defaults; `None`: it takes any number."""


def named_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call that has gone well, and the defaults of those left out, by name and in order."""
    kind = type(module)
    if kind not in SIGNATURES:
        parameters = inspect.signature(kind.forward).parameters.values()
        plain = all(p.kind in PLAIN for p in parameters)
        SIGNATURES[kind] = {p.name: p.default for p in parameters} if plain else None
    defaults = SIGNATURES[kind]
    if defaults is None or "forward" in module.__dict__:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments
    given: dict[str, Any] = {**dict(zip(defaults, (module, *args), strict=False)), **kwargs}
    return {name: given.get(name, default) for name, default in defaults.items()}


def arguments_in_order(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a forward call in the order of its signature: those given by name may come in any."""
    return tuple(named_arguments(module, args, kwargs).values()) if kwargs else args


def bind_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
    """Tensors among the arguments are the inputs; others, which a rule does not see, must have their defaults."""
    given = arguments_in_order(module, args, kwargs) if kwargs else args
    inputs = tuple([x for x in given if isinstance(x, Tensor)])
    if len(inputs) == len(args) + len(kwargs):
        return Binding(module, inputs)
    defaults = inspect.signature(module.forward).parameters
    for name, value in named_arguments(module, args, kwargs).items():
        default = defaults[name].default if name in defaults else inspect.Parameter.empty
        if not isinstance(value, Tensor) and value is not default and value != default and value is not module:
            reason = f"it was given the argument '{name}', which its rule does not see."
            return Binding(module, inputs, problem=reason, do="make it an attribute, or give the rule a method bind().")
    return Binding(module, inputs)


def in_front(x: Tensor, axis: Axis, n: int) -> Tensor:
    """Move the batch axis to the front; without one, repeat for `n` samples."""
    if axis is None:
        return x.expand(n, *x.shape)
    return x if axis == 0 else x.movedim(axis, 0)
