"""Rows of a matrix that two layers use, one of them transposed: a table of words that is tied to the last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.outer import Outer, pieces


def are_transposed(first: Outer, second: Outer, weight: Tensor) -> bool:
    """Whether one shows the entries of a weight as a matrix, and the other one its transpose."""
    if first.shape[2] != 1 or second.shape[2] != 1:
        return False
    one, other = first.matrix(weight)[0], second.matrix(weight)[0].mT
    return one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


def inner_products(first: Outer, second: Outer) -> Tensor:
    """`<r, r'>` `[V, N]` of each sample, `r = sum_t m_t a_t^T` and `r'^T = sum_s m'_s a'_s^T`, without rows.

    It is `sum_ts <m_t, a'_s> <a_t, m'_s>`.
    """
    v, n, _, o, i, t = first.shape
    total = wide(first.columns).new_zeros(v, n)
    for part in pieces(0, n, max(t, second.shape[-1]) * max(v * o, v * i, t)):
        m, theirs = (wide(one.columns[:, part, 0]) for one in (first, second))
        a, b = (wide(one.patches(part)[:, 0]) for one in (first, second))
        total[:, part] = ((m.mT @ b) * (a.mT @ theirs)).sum((2, 3))
    return total


def cost_of(first: Outer, second: Outer) -> int:
    """How many multiplications these take for a sample and a column."""
    o, i, t = first.shape[3:]
    return torch.Size((t, second.shape[-1], o + i)).numel()
