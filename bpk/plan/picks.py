"""Functions that move entries to places that data or strides say: what arguments get, in the pass that runs now.

Where these places are is no matter of the form of a graph, so what follows from them holds for one pass only. Each is
asked for the numbers of the entries that it takes; columns go back to these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.plan.arguments import Dependence, Parts, argument_shape, argument_shapes, narrowed, rearranged
from bpk.plan.repeated import compact
from bpk.recording import engine
from bpk.recording.graph.kept import in_own_pass, kept_by
from bpk.recording.graph.nodes import signed

MASKS = (torch.bool, torch.uint8)
"""Types of indices that are masks."""

Take = Callable[[Node, Tensor], Tensor]
"""What a function takes of a tensor: here, of the numbers of its entries."""


def numbers(shape: torch.Size, like: Tensor) -> Tensor:
    """The number of each entry."""
    return torch.arange(shape.numel(), device=like.device).reshape(shape)


def taken(node: Node, outs: Sequence[Tensor], take: Take, whole: Callable[[Node, int], int]) -> Parts:
    """Of a function that takes entries: each gets what has come to the places where it is.

    So many last axes are taken as a `whole`: along these, what repeats a number is looked at once.
    """
    shape, mat = argument_shape(node), outs[0]
    last = whole(node, len(shape))
    (some,) = compact((mat,), but=range(mat.dim() - last))
    sizes = (*shape[: len(shape) - last], *some.shape[mat.dim() - last :])
    places = take(node, numbers(torch.Size(sizes), mat)).flatten()
    found = mat.new_zeros(len(mat), prod(sizes)).index_add_(1, places, some.flatten(1))
    return [found.reshape(len(mat), *sizes).expand(len(mat), *shape)]


def put(node: Node, outs: Sequence[Tensor], take: Take) -> Parts:
    """Of a function that puts a second tensor into places of the first: both get what has come to theirs."""
    mat, found = outs[0], list[Tensor | None]()
    for number, shape in enumerate(argument_shapes(node)):
        if shape is None or not number:
            found.append(None if shape is None else mat)
            continue
        places = take(node, numbers(mat.shape[1:], mat))
        found.append(narrowed(mat.flatten(1)[:, places.flatten()].reshape(len(mat), *places.shape), shape))
    return found


def indexed(node: Node, x: Tensor) -> Tensor:
    """`x[..., indices, ...]`."""
    given = [slice(None) if i is None else i.to(x.device) for i in kept_by(node, "indices")[0]]
    return x[tuple(given)]


def behind_indices(node: Node, dims: int) -> int:
    """How many axes there are behind those that are indexed: by a mask, as many as it has."""
    given = kept_by(node, "indices")[0]
    return dims - sum(1 if i is None or i.dtype not in MASKS else i.dim() for i in given)


def behind_axis(node: Node, dims: int) -> int:
    """How many axes there are behind the one along which slices are taken."""
    return dims - 1 - signed(engine.saved(node, "dim")) % max(1, dims)


def none(node: Node, dims: int) -> int:
    """No axis is taken as a whole."""
    return 0


def along(node: Node, x: Tensor, name: str, entries: bool) -> Tensor:
    """What an index takes along an axis: whole slices, or entries."""
    axis, index = signed(engine.saved(node, "dim")), kept_by(node, name)[0].to(x.device)
    return x.gather(axis, index) if entries else x.index_select(axis, index.reshape(-1))


def masked(node: Node, x: Tensor) -> Tensor:
    """`x[mask]`."""
    return x[kept_by(node, "mask")[0].to(x.device).expand_as(x)]


def masked_scatter(node: Node, outs: Sequence[Tensor]) -> Parts:
    """The entries of the second argument, in their order, are where the mask is."""
    mat, found = outs[0], list[Tensor | None](outs[:1])
    for shape in argument_shapes(node)[1:]:
        if shape is None:
            found.append(None)
            continue
        part = mat.flatten(1)[:, masked(node, numbers(mat.shape[1:], mat))]
        rest = mat.new_zeros(len(mat), shape.numel() - part.shape[1])
        found.append(torch.cat([part, rest], 1).reshape(len(mat), *shape))
    return found


def assigned(node: Node, outs: Sequence[Tensor]) -> Parts:
    """Of a function in place of a part of a tensor (`x[:, t] = y`): ask it, whatever the function is.

    One that cannot be asked is not known. Others may multiply: what is then not of one sample is told by the numbers.
    What it keeps may be a checkpoint's, and cannot be seen.
    """
    try:
        found = in_own_pass(lambda: rearranged(node, outs))
    except RuntimeError:  # it keeps tensors in another precision
        return [None] * len(node.next_functions)
    shapes = argument_shapes(node)  # what was assigned may have been broadcast, which the engine would add up
    pairs = zip(found, shapes, strict=True)
    return [None if x is None or shape is None else narrowed(x.to(outs[0].dtype), shape) for x, shape in pairs]


TAKING: dict[str, tuple[Take, Callable[[Node, int], int]]] = {
    "Index": (indexed, behind_indices),
    "IndexSelect": (partial(along, name="index", entries=False), behind_axis),
    "Gather": (partial(along, name="index", entries=True), none),
    "Topk": (partial(along, name="indices", entries=True), none),
    "MaskedSelect": (masked, none),
}

PUTTING: dict[str, Take] = {
    "IndexPut": indexed,
    "IndexAdd": partial(along, name="index", entries=False),
    "IndexCopy": partial(along, name="index", entries=False),
    "Scatter": partial(along, name="index", entries=True),
    "ScatterAdd": partial(along, name="index", entries=True),
}

PICKS: dict[str, Dependence] = {
    **{name: partial(taken, take=take, whole=whole) for name, (take, whole) in TAKING.items()},
    **{name: partial(put, take=take) for name, take in PUTTING.items()},
    "MaskedScatter": masked_scatter,
    "CopySlices": assigned,
    "AsStrided": rearranged,  # how its argument lies in memory is no part of a graph's form
}
"""By the name of a function."""
