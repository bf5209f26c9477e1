"""Precision, memory and graphs: what every product of a rule has to mind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bpk.jacobians.core.engine import is_transformed, onednn_linear

CACHE = 1 << 18
"""How many numbers a buffer holds that should stay in cache (on a processor)."""

MEMORY = 1 << 26
"""How many numbers a buffer holds elsewhere."""

LARGE = 1 << 16
"""From how many multiplications on a matrix product is worth a call of its own, and from how many entries on a column
is squared on its own: this saves memory, and from here on no time is lost."""


def is_differentiated() -> bool:
    """Whether results have to be differentiable themselves: no buffers then, and nothing may be kept for later."""
    return torch.is_grad_enabled() or is_transformed()


def wide(x: Tensor) -> Tensor:
    """`x` in the type to compute in: half precision is too coarse for sums and exponentials, so float32 instead."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root with derivative 0, not infinity, at 0; NaN stays NaN, negative numbers become NaN."""
    if not is_differentiated():
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def chunks(total: int, size: int, device: torch.device) -> Iterator[slice]:
    """Slices of samples, as many at a time as a buffer holds with `size` numbers each."""
    step = max(1, (CACHE if device.type == "cpu" else MEMORY) // max(1, size))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` `[..., K], [M, K] -> [..., M]`.

    Large products in float32 go to oneDNN, which torch uses for convolutions alone: it is twice as
    fast as the default library on processors where that library does not use the widest vectors.
    """
    if (
        torch.is_grad_enabled()
        or x.dtype is not torch.float32
        or weight.dtype is not torch.float32
        or x.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
        or x.numel() * weight.shape[0] < LARGE
        or is_transformed()
    ):
        return torch.nn.functional.linear(x, weight)
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()  # oneDNN has no fast way for rows with gaps between them
    return onednn_linear(x, weight)


def sum_of_squares(m: Tensor, weights: Tensor | None) -> Tensor:
    """`sum_v w_vn m_vn^2` of columns `[V, N, ...]`: `[N, ...]`. Large ones are not all squared at once."""
    if m[:1].numel() < LARGE:
        squares = wide(m).square()
        return (squares if weights is None else squares * like_columns(weights, m)).sum(0)
    total = torch.zeros_like(wide(m[0]))
    for v, column in enumerate(m):
        x = wide(column)
        total.addcmul_(x if weights is None else x * like_columns(weights[v], column), x)
    return total


def like_columns(weights: Tensor, m: Tensor) -> Tensor:
    """Weights `[V, N]` for columns `[V, N, ...]`."""
    return weights.reshape(*weights.shape, *[1] * (m.dim() - weights.dim()))
