"""What functions of each kind hand on to their arguments, whatever the values are: `dependence.py` has a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.side_by_side import reshaped
from bpk.plan.arguments import Parts, argument_shape, argument_shapes, axes_of, narrowed
from bpk.plan.repeated import joined, placed, stacked
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import signed


def viewed(node: Node, outs: Sequence[Tensor]) -> Parts:
    """The same entries in the same order."""
    return [reshaped(outs[0], (len(outs[0]), *argument_shape(node)))]


def divided(node: Node, outs: Sequence[Tensor]) -> Parts:
    """The parts of a tensor along an axis, side by side."""
    unbound = name_of(type(node)) == "Unbind"
    (axis,) = axes_of(node, outs[0].dim() - 1 + unbound)
    return [(stacked if unbound else joined)(outs, 1 + axis)]


def sliced(node: Node, outs: Sequence[Tensor]) -> Parts:
    """Zeros, but where the function has taken a part of a tensor along an axis."""
    given, shape, mat = engine.attributes(node), argument_shape(node), outs[0]
    (axis,) = axes_of(node, len(shape))
    if name_of(type(node)) == "Select":
        index = signed(given["index"]) % shape[axis]
        return [placed(mat.unsqueeze(1 + axis), 1 + axis, shape[axis], slice(index, index + 1))]
    start, end = (None if given[name] is None else signed(given[name]) for name in ("start", "end"))
    where = slice(start, end, given["step"])
    return [placed(mat, 1 + axis, shape[axis], where)]


def pointwise(node: Node, outs: Sequence[Tensor]) -> Parts:
    """To every argument, summed along the axes along which it was broadcast."""
    return [None if shape is None else narrowed(outs[0], shape) for shape in argument_shapes(node)]


def along(node: Node, outs: Sequence[Tensor]) -> Parts:
    """All entries along the axis get the sum of them."""
    mat = outs[0]
    for axis in axes_of(node, mat.dim() - 1):
        mat = mat.sum(1 + axis, keepdim=True)
    return [mat.expand_as(outs[0])]


def reduced(node: Node, outs: Sequence[Tensor]) -> Parts:
    """All entries that were taken to one number get what comes to that."""
    shape, mat = argument_shape(node), outs[0]
    if mat.dim() - 1 < len(shape):
        for axis in sorted(axes_of(node, len(shape))):
            mat = mat.unsqueeze(1 + axis)
    return [mat.expand(len(mat), *shape)]


def first_axes(node: Node, outs: Sequence[Tensor], kept: Callable[[Node, int], int]) -> Parts:
    """The first argument alone, entry by entry along so many of its axes, and all entries along the others together."""
    shape = argument_shapes(node)[0]
    if shape is None:
        return [None]
    lead = 1 + kept(node, len(shape))
    total = outs[0].flatten(lead).sum(-1) if outs[0].dim() > lead else outs[0]
    return [total.reshape(*total.shape, *[1] * (len(shape) - lead + 1)).expand(len(total), *shape)]


def all_but(last: int, node: Node, dims: int) -> int:
    """How many axes there are before the last ones."""
    return dims - last


def fourier(node: Node, outs: Sequence[Tensor]) -> Parts:
    """All entries along the axes of a Fourier transform get the sum of them, however many there are behind it."""
    shape, mat = argument_shape(node), outs[0]
    for axis in axes_of(node, len(shape)):
        mat = mat.sum(1 + axis, keepdim=True)
    return [mat.expand(len(mat), *shape)]


def to_complex(node: Node, outs: Sequence[Tensor]) -> Parts:
    """Both parts of a complex number get what comes to it."""
    return [outs[0][..., None].expand(len(outs[0]), *argument_shape(node))]


def to_real(node: Node, outs: Sequence[Tensor]) -> Parts:
    """A complex number gets what comes to its parts."""
    return [outs[0].sum(-1)]


def attended(node: Node, outs: Sequence[Tensor]) -> Parts:
    """Queries, keys, values and what is added to their products: of each head all, or of all heads if these differ."""
    total, found = outs[0].sum((-2, -1), keepdim=True), list[Tensor | None]()
    for shape in argument_shapes(node):
        part = total
        for axis, size in enumerate((shape or ())[:-2], start=1):
            part = part.sum(axis, keepdim=True) if size != part.shape[axis] else part
        found.append(None if shape is None else part.expand(len(part), *shape))
    return found


def gated(node: Node, outs: Sequence[Tensor]) -> Parts:
    """Both halves of the argument along the axis."""
    (axis,) = axes_of(node, outs[0].dim() - 1)
    return [torch.cat([outs[0], outs[0]], 1 + axis)]


def product(node: Node, outs: Sequence[Tensor], first: int) -> Parts:
    """Matrix products: a row of the left factor gets what its row of the result has, a column of the right its column.

    What is added comes first; the factors have numbers `first` and `first + 1`.
    """
    found: Parts = []
    for number, shape in enumerate(argument_shapes(node)):
        if shape is None:
            found.append(None)
        elif number < first:
            found.append(narrowed(outs[0], shape))
        else:
            total = outs[0].sum(-1 if number == first else -2, keepdim=True)
            found.append(total.expand(len(total), *shape))
    return found
