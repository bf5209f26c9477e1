"""Matrices that are a diagonal and a few signed columns: curvature at the input of layers that subtract few averages.

Layers that mix the entries of a group by few numbers, a mean and a deviation or the sum of a softmax, have Jacobians
like `J = I - Q Q^T` with as few columns `Q`. Then `J^T D J` of a diagonal `D` is a diagonal again, and pairs with `Q`:

    J D J = D + Q F^T + F Q^T,    F = Q (Q^T D Q) / 2 - D Q.

Their second derivative is of this form as well, with the same `Q`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 4
"""So many times fewer columns than entries are few: a group with less entries is left as it is."""


@dataclass(frozen=True)
class NearDiagonal:
    """`diag(d_n) + sum_k s_kn u_kn u_kn^T`: `diag` `[N, *in]`, `columns` `[K, N, *in]` and `signs` `[K, N]`."""

    diag: Tensor
    columns: Tensor
    signs: Tensor


def paired(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_j q_j f_j^T + f_j q_j^T` of rows `[..., J, D]` as columns `[..., 2 J, D]` with signs `[2 J]`.

    By polarisation, with `c = sqrt(|f| / |q|)`, so that both terms of a column are equally long:

        q f^T + f q^T = 1/2 (c q + f/c) (c q + f/c)^T - 1/2 (c q - f/c) (c q - f/c)^T.
    """
    length, other = (x.norm(dim=-1, keepdim=True) for x in (first, second))
    nothing = (length == 0) | (other == 0)
    scale = torch.where(nothing, 1.0, other / length).sqrt()
    here, there = (torch.where(nothing, 0.0, x * 2**-0.5) for x in (first * scale, second / scale))
    ones = scale.new_ones(first.shape[-2])
    return torch.cat([here + there, here - there], -2), torch.cat([ones, -ones])


def beside_each_other(groups: Tensor) -> Tensor:
    """Columns of each group `[N, G, K, D]` as columns of a sample `[G K, N, G, D]`, zero outside their group."""
    return torch.diag_embed(groups.permute(2, 0, 3, 1)).permute(4, 0, 1, 3, 2).flatten(0, 1)
