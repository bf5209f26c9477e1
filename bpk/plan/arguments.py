"""The arguments of a function in autograd's graph: what they may get, their shapes, the axes that it works along."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.plan.repeated import stacked
from bpk.recording import engine
from bpk.recording.graph.nodes import signed
from bpk.recording.graph.side_effects import beyond

Parts = list[Tensor | None]
"""Columns `[V, *in]` by argument (`None`: not differentiable, or not known)."""

Dependence = Callable[[Node, Sequence[Tensor]], Parts]
"""From what comes to the outputs of a node, `[V, *out]` each, to what its arguments may get."""


def argument_shapes(node: Node) -> list[torch.Size | None]:
    """The shapes of a function's arguments (`None`: not differentiable)."""
    return [
        None if above is None else engine.output_shapes(above)[nr] for above, nr in map(beyond, node.next_functions)
    ]


def argument_shape(node: Node) -> torch.Size:
    """That of the only differentiable argument that a function has, which comes first."""
    (above, nr), *_ = map(beyond, node.next_functions)
    assert above is not None
    return engine.output_shapes(above)[nr]


def narrowed(mat: Tensor, shape: torch.Size) -> Tensor:
    """Columns `[V, *out]`, summed along the axes along which an argument of this shape was broadcast."""
    ones = (1,) * (mat.dim() - 1 - len(shape))
    return mat.sum_to_size(len(mat), *ones, *shape).reshape(len(mat), *shape)


def axes_of(node: Node, dims: int) -> list[int]:
    """The axes that a function was called with (all, if it names none)."""
    given = engine.attributes(node).get("dim")
    named = range(dims) if given in (None, ()) else [given] if isinstance(given, int) else given
    return [signed(axis) % dims for axis in named] if dims else []


def rearranged(node: Node, outs: Sequence[Tensor]) -> Parts:
    """Ask the function itself, one column after the other."""
    with torch.no_grad():
        found = [node(*column) for column in zip(*outs, strict=True)]  # type: ignore[operator]
    columns = [one if isinstance(one, tuple) else (one,) for one in found]
    return [None if part[0] is None else stacked(part, 0) for part in zip(*columns, strict=True)]
