"""Products over positions: what `y = x W^T` needs of columns `m` `[V, N, T, O]` at `y`, and of inputs `x` `[N, T, I]`.

The same sums as in `gemm`, where features lie behind positions. Without a graph they are formed in buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core import gemm
from bpk.jacobians.core.numeric import chunks, wide

FEW = 4
"""Up to how many samples at a time squares are added one by one, which saves a buffer for their sum."""


def summed(m: Tensor, x: Tensor) -> Tensor:
    """`sum_n sum_t m x^T`: `[V, O, I]`."""
    return torch.matmul(m.flatten(1, 2).transpose(1, 2), x.flatten(0, 1))


def per_sample(m: Tensor, x: Tensor, empty: gemm.Empty) -> Tensor:
    """`sum_t m x^T` for every sample: `[V, N, O, I]`, in memory that `empty` hands out."""
    if torch.is_grad_enabled():
        return torch.matmul(m.transpose(2, 3), x)
    out = empty((*m.shape[:2], m.shape[3], x.shape[2]), m)
    for column, goal in zip(m, out, strict=True):
        torch.bmm(column.transpose(1, 2), x, out=goal)
    return out


def squared_sum(m: Tensor, x: Tensor, weights: Tensor | None, keep: bool, empty: gemm.Empty) -> Tensor:
    """`sum_v w_vn (sum_t m x^T)^2`: `[O, I]`, or `[N, O, I]` where `keep`. No graph is built."""
    n, o, width = m.shape[1], m.shape[3], x.shape[2]
    total = empty((n if keep else 1, o, width), wide(m[:0])).zero_()
    scale = None if weights is None else weights.tolist()
    for part in chunks(n, 2 * o * width, m.device):
        rows = total.new_empty(part.stop - part.start, o, width)
        goal = total[part] if keep else torch.zeros_like(rows) if len(rows) > FEW else total.expand_as(rows)
        for k, column in enumerate(m[:, part]):
            torch.bmm(wide(column).transpose(1, 2), wide(x[part]), out=rows)
            if len(rows) > FEW:
                goal.addcmul_(rows, rows if weights is None else rows * weights[k, part, None, None])
                continue
            for j, (row, into) in enumerate(zip(rows, goal, strict=True), start=part.start):
                into.addcmul_(row, row, value=1.0 if scale is None else scale[k][j])
        if not keep and len(rows) > FEW:
            total[0] += goal.sum(0)
    return (total if keep else total[0]).to(m.dtype)


def norm_squared(m: Tensor, x: Tensor) -> Tensor:
    """`|sum_t m x^T|^2` for every sample of one column `m` `[N, T, O]`: `[N]`."""
    return gemm.norm_squared(patches(x), as_columns(m[None])[0], x.shape[2])


def patches(x: Tensor) -> gemm.Patches:
    """Inputs as `gemm` sees them: `[N, T, I]` to `[B, 1, I, T]`."""

    def some(samples: slice) -> Tensor:
        return x[samples].transpose(1, 2)[:, None]

    return some


def as_columns(m: Tensor) -> Tensor:
    """Columns as `gemm` sees them: `[V, N, T, O]` to `[V, N, 1, O, T]`."""
    return m.transpose(2, 3)[:, :, None]
