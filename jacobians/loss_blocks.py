"""The Hessian of a loss as blocks: which entries of one prediction it couples, found by products with it.

`H` is block-diagonal over the values of a label of its entries if and only if `H diag(f) = diag(f) H` for an `f` that
is constant where the label is, and different elsewhere. Both sides are applied to one random vector, with random `f`,
which shows a difference with probability one. Axes of the prediction are labels, and so is the number of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""Multiplies columns `[V, N, D]` with a Hessian."""

PIECE = 1 << 22
"""How many numbers are multiplied with the Hessian at a time, about."""


@dataclass(frozen=True)
class Factors:
    """Eigenvectors of blocks, scaled by the roots of absolute eigenvalues.

    `blocks` `[B, S]` are the entries `0 .. D - 1` of each block, `roots` `[N, B, S, K]` its columns, `signs`
    `[N, B, K]` those of its eigenvalues. `negative` is the most negative eigenvalue beyond rounding (0: none).
    """

    blocks: Tensor
    roots: Tensor
    signs: Tensor
    negative: float

    @property
    def count(self) -> int:
        """The number of columns, each non-zero in one block."""
        return self.blocks.shape[0] * self.roots.shape[3]

    def columns(self, numbers: Tensor) -> Tensor:
        """Some columns, dense: `[len, N, D]`."""
        block, k = numbers % len(self.blocks), numbers // len(self.blocks)
        own = self.roots[:, block, :, k]  # [len, N, S]
        places = self.blocks[block][:, None].expand_as(own)
        return own.new_zeros(len(numbers), own.shape[1], self.blocks.numel()).scatter(2, places, own)

    def column_signs(self) -> Tensor:
        """Signs `[K, N]` in the order of the columns."""
        return self.signs.permute(2, 1, 0).reshape(self.count, -1)

    def mix(self, coefficients: Tensor) -> Tensor:
        """Random columns `[M, N, D]` from coefficients `[M, N, B, K]`."""
        own = torch.einsum("nbsk,mnbk->mnbs", self.roots, coefficients).flatten(2)
        return torch.zeros_like(own).index_copy(2, self.blocks.flatten(), own)


def separable(product: Product, labels: Sequence[Tensor], point: Tensor, floor: float, tolerance: float) -> list[bool]:
    """By label (`[N, D]`, whole numbers): whether the Hessian at `point` `[N, D]` couples no two values of it.

    Samples with NaN are not looked at. Differences below `floor` are rounding.
    """
    generator = torch.Generator().manual_seed(0)  # leaves the global generator alone

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(point)

    probe = draw(*point.shape)
    scales = [draw(int(label.max()) + 1 if label.numel() else 1)[label] for label in labels]
    plain, *scaled = product(torch.stack([probe, *[scale * probe for scale in scales]]))
    answers = []
    for scale, found in zip(scales, scaled, strict=True):
        expected = scale * plain
        size = expected.norm(dim=1) + found.norm(dim=1)
        answers.append(not bool(((found - expected).norm(dim=1) > tolerance * size + floor).any()))
    return answers


def blocks_of(shape: Sequence[int], coupled: Sequence[bool], copies: int) -> Tensor:
    """Entries `[B, S]` of each block, where some axes of a prediction are coupled and it consists of `copies`."""
    size = torch.Size(shape).numel()
    entries = torch.arange(size).reshape(tuple(shape))
    inner = [axis for axis, together in enumerate(coupled) if together]
    outer = [axis for axis, together in enumerate(coupled) if not together]
    count = torch.Size(shape[axis] for axis in outer).numel()
    own = entries.permute((*outer, *inner)).reshape(count, torch.Size(shape[axis] for axis in inner).numel())
    return torch.cat([own + size * k for k in range(copies)], 1)


def dense_blocks(product: Product, blocks: Tensor, samples: int, like: Tensor) -> Tensor:
    """All blocks `[N, B, S, S]`, symmetric: one product for each entry of a block, in all blocks at once."""
    count, size = blocks.shape
    places = blocks.to(like.device)
    rows = []
    for part in torch.arange(size).split(max(1, PIECE // max(1, samples * blocks.numel()))):
        units = like.new_zeros(len(part), samples, blocks.numel())
        for k, entry in enumerate(part.tolist()):
            units[k, :, places[:, entry]] = 1
        rows.append(product(units)[:, :, places.flatten()].reshape(len(part), samples, count, size))
    dense = torch.cat(rows).permute(1, 2, 0, 3) if rows else like.new_zeros(samples, count, 0, 0)
    return (dense + dense.mT) / 2


def factorise(dense: Tensor, blocks: Tensor, eps: float, floor: float) -> Factors:
    """Eigendecompose blocks `[N, B, S, S]`; a sample with NaN or infinite entries gets NaN columns."""
    healthy = dense.isfinite().flatten(1).all(1)[:, None, None, None]
    values, basis = torch.linalg.eigh(torch.where(healthy, dense, 0.0).double())
    size = values.abs().amax(2, keepdim=True) if values.numel() else values
    noise = eps * max(32, dense.shape[2]) * size  # what rounding makes of a zero eigenvalue, of either sign
    values = torch.where(values.abs() <= noise, 0.0, values)
    of_sample = size.amax(1, keepdim=True) if values.numel() else size
    below = torch.where(values < -eps * max(32, dense.shape[2]) * of_sample - floor, values, 0.0)
    zero = values == 0
    lengths = torch.where(zero, 0.0, torch.where(zero, 1.0, values).abs().sqrt())  # with a derivative also at 0
    roots = torch.where(healthy, basis * lengths[:, :, None], torch.nan)
    negative = float(below.detach().min()) if below.numel() else 0.0
    return Factors(blocks.to(dense.device), roots, values.sign(), negative)
