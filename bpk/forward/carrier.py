"""Tensors that carry Taylor coefficients: what a model is called with, so that its own forward pass propagates them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.series import Series
from bpk.recording import engine
from bpk.recording.treatment import StandIn

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What a call of a function gives where some of its arguments are carriers."""

TRANSFORMS = "/torch/_functorch/"
"""Where the code of `torch.func` is."""


@dataclass(eq=False)
class Propagation:
    """One forward pass with coefficients.

    `by_sample` says that samples must not mix, `graph` whether results are to be differentiated, `answer` what
    functions give. `alive` are the carriers that exist, by `id`, and `constants` refers to tensors and arrays that were
    taken out of them (`detach`, `numpy`). It may run inside of a transform of `torch.func`, but none inside of it.
    A `refusal` counts, too, where the code that it was raised into makes another error of it.
    """

    by_sample: bool
    graph: bool
    answer: Answer
    alive: weakref.WeakValueDictionary[int, Carrier] = field(default_factory=weakref.WeakValueDictionary)
    constants: list[weakref.ref[Any]] = field(default_factory=list)
    transformed: bool = field(default_factory=is_transformed)
    refusal: UnsupportedLayer | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, functions of values and coefficients run, whose graph is kept where results are differentiated.

        Checkpoints would run functions again without rules: what is saved inside of them is kept, too.
        """
        inside = self.graph and engine.checkpointing() is not None
        kept = torch.autograd.graph.saved_tensors_hooks(identity, identity) if inside else nullcontext()
        with torch.set_grad_enabled(self.graph), kept:
            yield

    def carry(self, series: Series, apart: bool) -> Tensor:
        """A tensor with this value and these coefficients; the value itself where all are zero."""
        return series.value if is_constant(series) else self.hold(series, apart)

    def hold(self, series: Series, apart: bool) -> Carrier:
        """The same also where all are zero: what depends on x may be written into it later."""
        carrier = series.value.detach().as_subclass(Carrier)
        carrier.series, carrier.apart, carrier.propagation = series, apart, self
        self.alive[id(carrier)] = carrier
        return carrier

    def note(self, result: Any) -> None:
        """Tensors and arrays without coefficients, which may look at the memory of carriers."""
        self.constants = [ref for ref in self.constants if ref() is not None]
        self.constants += [weakref.ref(x) for x in tree_leaves(result) if hasattr(x, "__array__")]

    def taken_out(self) -> list[Any]:
        """Those that are still there."""
        return [x for ref in self.constants if (x := ref()) is not None]


def start_of(x: Any) -> int:
    """Where in memory a tensor or an array begins."""
    start: int = x.data_ptr() if isinstance(x, Tensor) else x.__array_interface__["data"][0]
    return start


def identity(x: Tensor) -> Tensor:
    """What is saved, as it is."""
    return x


class Carrier(StandIn):
    """A value on curves. `apart` says that rows of axis 0 are known to depend on the same rows of the input alone."""

    series: Series
    apart: bool
    propagation: Propagation

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        return carriers((args, given))[0].propagation.answer(func, tuple(args), given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says less of its arguments
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what `__torch_function__` has not seen: it would take the value for all there is."""
        refusal = UnsupportedLayer(transformed() if is_inside_of_transform() else underneath(str(func)))
        for carrier in carriers((args, dict(kwargs or {}))):
            carrier.propagation.refusal = refusal
        raise refusal


def is_inside_of_transform() -> bool:
    """Whether a transform of `torch.func` calls, also where it has stepped back to let its function run."""
    files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe()))
    return any(TRANSFORMS in file.replace("\\", "/") for file in files)


def transformed() -> str:
    """Why coefficients cannot pass a transform."""
    return explain(
        "Taylor coefficients cannot pass a transform of torch.func (vmap, grad, jvp, ...).",
        "it runs a function on tensors of its own, which have values alone.",
        "write the function for the whole batch, and leave derivatives in the input to bpk.",
    )


def underneath(name: str) -> str:
    """Why coefficients do not reach what works underneath torch's functions."""
    why = "it was called by code underneath torch's functions in Python, which sees values alone."
    return explain(f"Taylor coefficients cannot pass {name}.", why, "write it with functions of torch.")


def is_constant(series: Series) -> bool:
    """Whether all coefficients are zero."""
    return all(c is None for c in series.terms)


def without_constants(arguments: Any) -> Any:
    """Nested arguments with the values of carriers all of whose coefficients are zero in their place."""
    return tree_map(lambda x: x.series.value if isinstance(x, Carrier) and is_constant(x.series) else x, arguments)


def held(propagation: Propagation, like: Series, result: Any) -> Any:
    """A nested result that does not depend on x, ready to be written into."""
    constant = {id(x): propagation.hold(like.constant(x), True) for x in differentiable(result)}
    return replaced(result, constant)


def carriers(arguments: Any) -> list[Carrier]:
    """The carriers in nested arguments, each once."""
    return list({id(x): x for x in tree_leaves(arguments) if isinstance(x, Carrier)}.values())


def occurrences(arguments: Any) -> int:
    """At how many places of nested arguments carriers stand: the two factors of `x * x` are two, of one square."""
    return sum(isinstance(x, Carrier) for x in tree_leaves(arguments))


def values(arguments: Any) -> Any:
    """Nested arguments with the values of carriers in their place."""
    return tree_map(lambda x: x.series.value if isinstance(x, Carrier) else x, arguments)


def require_unchanged(what: str, moving: Sequence[Carrier], versions: Sequence[int]) -> None:
    """Refuse where the values of carriers were changed in place by what does not say so."""
    if versions != versions_of(moving):
        why = "it changes its input in place, which its coefficients were to be computed from."
        raise UnsupportedLayer(f"Taylor coefficients cannot pass {what}.", why, "write it out of place.")


def versions_of(moving: Sequence[Carrier]) -> list[int]:
    """How often the values of carriers have been changed."""
    return [0 if c.series.value.is_inference() else c.series.value._version for c in moving]


def differentiable(result: Any) -> list[Tensor]:
    """The tensors of a result that may have derivatives."""
    leaves = tree_leaves(result)
    return [x for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]


def replaced(result: Any, tensors: Mapping[int, Tensor]) -> Any:
    """A nested result with some tensors, by `id`, replaced."""
    return tree_map(lambda x: tensors.get(id(x), x) if isinstance(x, Tensor) else x, result)
