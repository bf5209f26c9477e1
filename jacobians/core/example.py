"""Examples: small concrete layers, from which tests and documentation of a rule are generated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import RuleError


@dataclass(frozen=True)
class Example:
    """A small concrete layer with input shapes, from which tests and documentation are generated."""

    layer: Callable[..., nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    target: Callable[..., Tensor | tuple[Tensor, ...]] | None = None
    domain: Callable[[Tensor], Tensor] | None = None

    def build(self) -> nn.Module:
        """The layer, in the mode that the example asks for."""
        return self.layer(*self.args, **self.kwargs).train(self.train)

    def inputs(self, dtype: torch.dtype = torch.float64, batch: int | None = None) -> tuple[Tensor, ...]:
        """Random inputs of the example's shapes (with another batch size if asked).

        `domain` maps normal numbers to where the layer is defined; `target(shape)` gives further inputs.
        """
        shapes = [s if batch is None else (batch, *s[1:]) for s in self.shapes]
        drawn = [torch.randn(s, dtype=torch.float64) for s in shapes]
        if self.domain is not None:
            drawn = [self.domain(x) for x in drawn]
        if self.target is not None:
            further = self.target(shapes[0])
            drawn.extend(further if isinstance(further, tuple) else (further,))
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in drawn)

    def __str__(self) -> str:
        shown = [_spell(a) for a in self.args] + [f"{k}={_spell(v)}" for k, v in self.kwargs.items()]
        name = getattr(self.layer, "__name__", str(self.layer))
        return f"{name}({', '.join(shown)}){'.train' if self.train else ''} on {'x'.join(map(str, self.shapes[0]))}"


def _spell(value: Any) -> str:
    """`repr`, but functions by name: the names of tests hold no addresses."""
    return value.__name__ if inspect.isroutine(value) else repr(value)


def case(
    layer: Callable[..., nn.Module],
    *args: Any,
    shape: Sequence[int] | None = None,
    shapes: Sequence[Sequence[int]] = (),
    train: bool = False,
    target: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
    domain: Callable[[Tensor], Tensor] | None = None,
    **kwargs: Any,
) -> Example:
    """Write an `Example` the way the layer itself is written.

    Args:
        layer: The layer's class, or a function that builds it.
        args, kwargs: What it is built with.
        shape: The shape of its input, batch axis first.
        shapes: In place of `shape`, the shapes of several inputs, in the order in which the layer takes them.
        train: Whether the layer is in training mode.
        target: From the first shape to further inputs, such as the target of a loss.
        domain: From normal numbers to inputs for which the layer is defined.

    >>> str(case(nn.Linear, 2, 3, bias=False, shape=(4, 2)))
    'Linear(2, 3, bias=False) on 4x2'
    >>> [list(x.shape) for x in case(nn.Bilinear, 2, 3, 1, shapes=((4, 2), (4, 3))).inputs()]
    [[4, 2], [4, 3]]
    """
    if (shape is None) == (not shapes):
        name = getattr(layer, "__name__", str(layer))
        raise RuleError(
            f"The example of {name} has {'no shape' if shape is None else 'shape= and shapes='}.",
            "inputs are drawn in the shapes that it gives.",
            f"write case({name}, ..., shape=(4, 3)), or shapes=((4, 3), (4, 2)) for two inputs.",
        )
    given = (tuple(shape),) if shape is not None else tuple(tuple(s) for s in shapes)
    return Example(layer, given, args, kwargs, train, target, domain)
