"""Tensors in another shape, or flattened behind their leading axes, and several of them side by side as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")


def as_rows(x: Tensor, lead: int = 1) -> Tensor:
    """`[N, *x]` as a matrix `[N, D]`, also where a row is one number or there is none; or with more axes in front."""
    return x.reshape(*x.shape[:lead], x.shape[lead:].numel())


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x.reshape(shape)`, but along last axes that stay as they are, what repeats a number (stride 0) goes on to."""
    shape, axis = torch.Size(shape), 0
    while axis < min(x.dim(), len(shape)) and x.shape[-1 - axis] == shape[-1 - axis] and not x.stride(-1 - axis):
        axis += 1
    if not (axis and x.numel()):
        return x.reshape(shape)
    once = x
    for last in range(1, axis + 1):
        once = once.narrow(-last, 0, 1)
    return once.reshape(*shape[: len(shape) - axis], *[1] * axis).expand(shape)


def beside(parts: Iterable[Tensor], lead: int) -> Tensor:
    """`[*lead, *x]` of each part as one `[*lead, D]`."""
    return torch.cat([as_rows(x, lead) for x in parts], lead)


def taken_apart(joint: Tensor, shapes: Mapping[Key, torch.Size], lead: int) -> dict[Key, Tensor]:
    """The way back, given the shape `*x` of each part; the only part may have its shape already."""
    parts = joint.split([shape.numel() for shape in shapes.values()], lead) if len(shapes) > 1 else [joint]
    pairs = zip(shapes.items(), parts, strict=True)
    return {key: part.reshape(*joint.shape[:lead], *shape) for (key, shape), part in pairs}


def concatenated(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after the other along an axis; the only one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def pick(x: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """Entries along an axis; a view where they follow each other."""
    first = places[0]
    if tuple(places) == tuple(range(first, first + len(places))):
        return x.narrow(dim, first, len(places))
    return torch.cat([x.narrow(dim, k, 1) for k in places], dim)
