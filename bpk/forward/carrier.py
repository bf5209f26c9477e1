"""Tensors that carry Taylor coefficients: what a model is called with, so that its own forward pass propagates them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.series import Series
from bpk.recording import engine
from bpk.recording.treatment import StandIn

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What a call of a function gives where some of its arguments are carriers."""


@dataclass(eq=False)
class Propagation:
    """One forward pass with coefficients.

    `by_sample` says that samples must not mix, `graph` whether results are to be differentiated, `answer` what
    functions give. `alive` are the carriers that exist, by `id`.
    """

    by_sample: bool
    graph: bool
    answer: Answer
    alive: weakref.WeakValueDictionary[int, Carrier] = field(default_factory=weakref.WeakValueDictionary)

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
        raise UnsupportedLayer(explain(f"Taylor coefficients cannot pass {what}.", why, "write it out of place."))


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
