"""Sums over columns and rows `[V, N, *p]`."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import FEW_NUMBERS, sum_of_squared_rows, wide
from bpk.jacobians.core.side_by_side import as_rows

CHUNK = 1 << 18
"""How many numbers are squared at once, so that they stay in the processor's cache."""


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """`sum_n c_n rows_n`. (`torch.tensordot` takes longer to begin than a small one takes.)"""
    shape = rows.shape[1:]
    return (weights @ rows.reshape(len(weights), shape.numel())).view(shape)


def add_into(total: Tensor, part: Tensor) -> Tensor:
    """The sum, in the memory of `total` where no graph is built."""
    return total + part if torch.is_grad_enabled() else total.add_(part)


def squares(rows: Tensor, signs: Tensor | None, per_sample: bool) -> Tensor:
    """`sum_v s_v rows_v^2` for materialised rows `[V, N, *p]`, without a second tensor of their size."""
    if torch.is_grad_enabled():
        return sum_of_squared_rows(rows, signs, per_sample)
    v, n = rows.shape[:2]
    flat = as_rows(rows, 2)
    total = flat.new_zeros((n if per_sample else 1), flat.shape[2])
    step = max(1, CHUNK // max(1, flat.shape[2]))
    several = max(1, step // max(1, n))  # small columns at once
    for k in range(0, v, several):
        for start in range(0, n, step):
            columns, here = slice(k, k + several), slice(start, start + step)
            piece = flat[columns, here].square()
            if signs is not None:
                piece *= signs[columns, here, None]
            if per_sample:
                total[here] += piece.sum(0) if several > 1 else piece[0]
            else:
                total[0] += piece.sum((0, 1))
    return total.reshape(rows.shape[1 if per_sample else 2 :])


def squared_norms(rows: Tensor) -> Tensor:
    """`[N]`, of rows `[N, *p]`; the square of a norm has no derivative at zero."""
    flat = as_rows(rows)
    return flat.square().sum(1) if torch.is_grad_enabled() else torch.linalg.vector_norm(flat, dim=1).square()


def are_few(param: Tensor, n: int, column: Tensor) -> bool:
    """Whether the rows `[N, *p]` of a column are so few numbers that their sum is best taken of them."""
    return n * param.numel() <= FEW_NUMBERS and wide(column) is column and not torch.is_grad_enabled()
