"""Products over time: what `out_t = W u_t` needs of columns `m` `[T, V, N, O]` and inputs `u` `[T, N, I]`.

The same sums as in `gemm`, for sequences that lie in memory time first. Without a graph they are formed in buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.gemm import Empty
from bpk.jacobians.core.numeric import CACHE


def summed(m: Tensor, u: Tensor) -> Tensor:
    """`sum_n sum_t m u^T`: `[V, O, I]`."""
    flat = u.flatten(0, 1)
    return torch.matmul(m.movedim(1, 0).flatten(1, 2).transpose(1, 2), flat)


def per_sample(m: Tensor, u: Tensor, empty: Empty) -> Tensor:
    """`sum_t m u^T` for every sample: `[V, N, O, I]`, in memory that `empty` hands out."""
    right = u.transpose(0, 1)
    if torch.is_grad_enabled():
        return torch.matmul(m.permute(1, 2, 3, 0), right)
    out = empty((*m.shape[1:], u.shape[-1]), m)
    for columns, rows in zip(m.unbind(1), out, strict=True):
        torch.bmm(columns.permute(1, 2, 0), right, out=rows)
    return out


def squared_sum(m: Tensor, u: Tensor, weights: Tensor | None, keep: bool, empty: Empty) -> Tensor:
    """`sum_v w_vn (sum_t m u^T)^2`: `[O, I]`, or `[N, O, I]` where `keep`. No graph is built."""
    _, v, n, o = m.shape
    width = u.shape[-1]
    total = empty((n, o, width) if keep else (1, o, width), m).zero_()
    scale = None if weights is None else weights.tolist()
    step = max(1, CACHE // (o * width)) if m.device.type == "cpu" else n
    buffer = m.new_empty(min(step, n), o, width)
    for k in range(v):
        for first in range(0, n, step):
            here = slice(first, min(first + step, n))
            rows = buffer[: here.stop - first]
            torch.bmm(m[:, k, here].permute(1, 2, 0), u[:, here].transpose(0, 1), out=rows)
            for j, row in enumerate(rows, start=first):
                total[j if keep else 0].addcmul_(row, row, value=1.0 if scale is None else scale[k][j])
    return total if keep else total[0]


def norm_squared(m: Tensor, u: Tensor) -> Tensor:
    """`|sum_t m u^T|^2` for every sample of one column `m` `[T, N, O]`: `[N]`, by Gram matrices if that is cheaper."""
    t, _, o = m.shape
    left, right = m.transpose(0, 1), u.transpose(0, 1)
    if t * (o + right.shape[-1]) < o * right.shape[-1]:
        return ((left @ left.transpose(1, 2)) * (right @ right.transpose(1, 2))).sum((1, 2))
    return (left.transpose(1, 2) @ right).square().sum((1, 2))
