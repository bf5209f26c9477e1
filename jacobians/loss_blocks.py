"""The Hessian of a loss as blocks: which entries of one prediction it couples, found by products with it.

`H` is block-diagonal over the values of a label of its entries if and only if `H diag(f) = diag(f) H` for an `f` that
is constant where the label is, and different elsewhere. Both sides are applied to one random vector, with random `f`,
which shows a difference with probability one. Axes of the prediction are labels, and so is the number of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.block_diagonal import Product
from bpk.jacobians.loss import safe_sqrt
from bpk.jacobians.probing import draw


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
    probe = draw(point.shape, point, 0)
    counts = [int(label.max()) + 1 if label.numel() else 1 for label in labels]
    scales = [draw((count,), point, k)[label] for k, (count, label) in enumerate(zip(counts, labels, strict=True), 1)]
    plain, *scaled = product(torch.stack([probe, *[scale * probe for scale in scales]]))
    answers = []
    for scale, found in zip(scales, scaled, strict=True):
        expected = scale * plain
        size = expected.norm(dim=1) + found.norm(dim=1)
        answers.append(not bool(((found - expected).norm(dim=1) > tolerance * size + floor).any()))
    return answers


def factorise(dense: Tensor, blocks: Tensor, eps: float, floor: float) -> Factors:
    """Eigendecompose blocks `[N, B, S, S]`; a sample with NaN or infinite entries gets NaN columns."""
    healthy = dense.isfinite().flatten(1).all(1)[:, None, None, None]
    values, basis = torch.linalg.eigh(torch.where(healthy, dense, 0.0).double())
    size = values.abs().amax(2, keepdim=True) if values.numel() else values
    noise = eps * max(32, dense.shape[2]) * size  # what rounding makes of a zero eigenvalue, of either sign
    values = torch.where(values.abs() <= noise, 0.0, values)
    of_sample = size.amax(1, keepdim=True) if values.numel() else size
    below = torch.where(values < -eps * max(32, dense.shape[2]) * of_sample - floor, values, 0.0)
    roots = torch.where(healthy, basis * safe_sqrt(values.abs())[:, :, None], torch.nan)
    negative = float(below.detach().min()) if below.numel() else 0.0
    return Factors(blocks, roots, values.sign(), negative)
