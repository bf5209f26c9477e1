"""Along which axes a second derivative is block-diagonal, found by probing, and its blocks as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

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
    probe = [random(like, 1, *shape) for shape in shapes]
    plain = product(probe)
    scale = max(float(mat.nan_to_num(0.0).abs().max()) for mat in plain)
    tolerance = torch.finfo(like.dtype).eps ** 0.5 * scale
    apart = []
    for axis in axes:
        f = random(like, shapes[0][axis]).reshape([-1 if axis == j else 1 for j in range(min(dims))])
        scaled = product([f * mat for mat in probe])
        off = [float((x - f * y).nan_to_num(0.0).abs().max()) for x, y in zip(scaled, plain, strict=True)]
        if max(off) <= tolerance:
            apart.append(axis)
    return Blocks(tuple(shapes), tuple(apart))


def random(like: Tensor, *shape: int) -> Tensor:
    """The same numbers every time; the global generator is left alone."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def alone(vectors: Tensor, blocks: Blocks) -> list[Tensor]:
    """Columns `[B, N, P, B]` of blocks as columns `[B P, N, *x]`, each of which is zero at all other positions."""
    if blocks.positions == 1:
        spread = vectors
    else:
        here = torch.eye(blocks.positions, dtype=vectors.dtype, device=vectors.device)
        spread = (vectors[:, None] * here[:, None, :, None]).flatten(0, 1)
    parts = spread.split(blocks.sizes, 3)
    return [blocks.from_blocks(k, part) for k, part in enumerate(parts)]
