"""The Hessian of a loss as blocks: which entries of one prediction it couples, found by products with it.

`H` is block-diagonal over the values of a label of its entries if and only if `H diag(f) = diag(f) H` for an `f` that
is constant where the label is, and different elsewhere. Both sides are applied to one random vector, with random `f`,
which shows a difference with probability one (see `probing.py`). Axes of the prediction are labels, and so is the
number of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.losses.loss import safe_sqrt
from bpk.jacobians.second_order.block_diagonal import Product
from bpk.jacobians.second_order.probing import ROUNDINGS, draw, marks, same

FORMATS = (torch.float16, torch.bfloat16, torch.float32)


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


def separable(product: Product, labels: Sequence[Tensor], point: Tensor, eps: float) -> list[bool]:
    """By label (`[N, D]`, whole numbers): whether the Hessian at `point` `[N, D]` couples no two values of it.

    Entries with NaN are not looked at. `eps` is the rounding of a product; its format limits factors.
    """
    within = next((dtype for dtype in FORMATS if torch.finfo(dtype).eps == eps), point.dtype)
    probe, most = draw(point.shape, point, 0), min(ROUNDINGS * eps, eps**0.5)
    plain = product(probe[None])[0]

    def is_apart(label: Tensor) -> bool:
        count = int(label.max()) + 1 if label.numel() else 1
        factors = marks(label, count, point.dtype, within)
        return all(same(product((f * probe)[None])[0], f * plain, most) for f in factors)

    return [is_apart(label) for label in labels]


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
