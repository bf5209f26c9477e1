"""Tensors in which a number stands again and again along an axis (stride 0): what is made of them stays small, too."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor


def compact(parts: Sequence[Tensor], but: Container[int] = ()) -> list[Tensor]:
    """Tensors of as many axes, with one entry along those along which all of them repeat one, `but` for some axes."""
    some = list(parts)
    for axis in range(parts[0].dim()):
        if axis not in but and all(x.shape[axis] > 1 and not x.stride(axis) for x in parts):
            some = [x.narrow(axis, 0, 1) for x in some]
    return some


def added(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two tensors of one shape."""
    one, other = compact((first, second))
    return (one + other).expand(first.shape)


def stacked(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors of one shape side by side along a new axis."""
    shape = list(parts[0].shape)
    shape.insert(axis, len(parts))
    return torch.stack(compact(parts), axis).expand(shape)


def joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after the other along an axis, in which they may differ."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return torch.cat(compact(parts, but=(axis,)), axis).expand(shape)


def placed(part: Tensor, axis: int, size: int, where: slice) -> Tensor:
    """A tensor of zeros that has the part at some places along an axis."""
    (some,) = compact((part,), but=(axis,))
    shape, full = list(some.shape), list(part.shape)
    shape[axis] = full[axis] = size
    found = some.new_zeros(shape)
    found.movedim(axis, 0)[where] = some.movedim(axis, 0)
    return found.expand(full)
