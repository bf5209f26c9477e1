"""Along which axes a second derivative is block-diagonal, found by probing, and its blocks as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from bpk.jacobians.second_order.probing import draw, marks, same, tolerance

Product = Callable[[list[Tensor]], list[Tensor]]
"""Columns `[K, N, *x]` for each beginning, times the second derivative."""


@dataclass(frozen=True)
class Blocks:
    """The form of a second derivative: `apart` are the axes (batch axis 0) along which it is block-diagonal."""

    shapes: tuple[torch.Size, ...]
    apart: tuple[int, ...]

    @property
    def positions(self) -> int:
        """How many blocks a sample has."""
        return prod(self.shapes[0][axis] for axis in self.apart)

    @property
    def sizes(self) -> list[int]:
        """The rows of a block, by beginning."""
        return [shape[1:].numel() // self.positions for shape in self.shapes]

    def to_blocks(self, k: int, mat: Tensor) -> Tensor:
        """Columns `[K, N, *x]` of beginning `k` as `[K, N, P, B_k]`."""
        front = tuple(range(2, 2 + len(self.apart)))
        moved = mat.movedim(tuple(1 + axis for axis in self.apart), front)
        return moved.reshape(*mat.shape[:2], self.positions, -1)

    def from_blocks(self, k: int, mat: Tensor) -> Tensor:
        """The way back."""
        front = tuple(range(2, 2 + len(self.apart)))
        shape = self.shapes[k]
        rest = [size for axis, size in enumerate(shape) if axis not in self.apart][1:]
        moved = mat.reshape(*mat.shape[:2], *(shape[axis] for axis in self.apart), *rest)
        return moved.movedim(front, tuple(1 + axis for axis in self.apart))


def blocks_of(product: Product, shapes: Sequence[torch.Size], like: Tensor) -> Blocks:
    """Find the form of a second derivative by probing.

    Args:
        product: Multiplies with it.
        shapes: `[N, *x]` of every beginning.
        like: A tensor of the right precision and device.
    """
    dims = {len(shape) for shape in shapes}
    axes = [a for a in range(1, min(dims)) if len(dims) == 1 and len({shape[a] for shape in shapes}) == 1]
    most, apart = tolerance(like), []
    probe = [draw((1, *shape), like, k) for k, shape in enumerate(shapes)]
    plain = product(probe) if axes and most >= 0 else []

    def is_apart(f: Tensor) -> bool:
        scaled = product([f * mat for mat in probe])  # one column at a time, so that all are rounded alike
        return all(same(x, f * y, most) for x, y in zip(scaled, plain, strict=True))

    for axis in axes if most >= 0 else ():
        size = shapes[0][axis]
        factors = marks(torch.arange(size, device=like.device), size, like.dtype)
        along = [-1 if axis == j else 1 for j in range(min(dims))]
        if all(is_apart(f.reshape(along)) for f in factors):
            apart.append(axis)
    return Blocks(tuple(shapes), tuple(apart))


def alone(vectors: Tensor, blocks: Blocks, here: Tensor) -> list[Tensor]:
    """Some of the columns `[B, N, P, B]` of blocks, each at one position and zero at all others: `[K, N, *x]`.

    `here` `[K]` are numbers of pairs of a column and its position, position running faster.
    """
    column, position = here // blocks.positions, here % blocks.positions
    spread = vectors[column]
    if blocks.positions > 1:
        mask = torch.zeros(len(here), blocks.positions, dtype=vectors.dtype, device=vectors.device)
        spread = spread * mask.scatter_(1, position[:, None], 1.0)[:, None, :, None]
    return [blocks.from_blocks(k, part) for k, part in enumerate(spread.split(blocks.sizes, 3))]
