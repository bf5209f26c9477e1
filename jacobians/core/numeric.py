"""Precision, memory and graphs: what every product of a rule has to mind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from bpk.jacobians.core.engine import is_transformed, onednn_linear

CACHE = 1 << 18
"""How many numbers a buffer holds that should stay in cache (on a processor)."""

MEMORY = 1 << 26
"""How many numbers a buffer holds elsewhere."""

LARGE = 1 << 16
"""From how many entries on a column is squared on its own: this saves memory, and from here on no time is lost."""

WORTH_ONEDNN = 1 << 20
"""From how many multiplications on oneDNN makes up for what one call of it costs."""

ONE_BY_ONE = 2 * WORTH_ONEDNN
"""From how many multiplications on products of a batch go to oneDNN one after the other."""

WORTH_TURNING = 1 << 24
"""From how many multiplications on oneDNN makes up for what it takes to turn an operand, whose rows have gaps."""

NARROW = 16
"""With fewer rows than these on the other side, the default library takes several times as long as oneDNN."""

ROUNDINGS = 1024
"""A sum that is less than so many roundings of its terms is not taken from these."""

FEW_NUMBERS = 1 << 14
"""Up to so many numbers, what one call of a function costs is more than what it does with them."""


def is_differentiated() -> bool:
    """Whether results have to be differentiable themselves: no buffers then, and nothing may be kept for later."""
    return torch.is_grad_enabled() or is_transformed()


def tracked(x: Tensor) -> Tensor:
    """The same numbers in a tensor that graphs can keep, which those made in inference mode are not."""
    return x.clone() if x.is_inference() else x


HALF = (torch.bfloat16, torch.float16)


def wide(x: Tensor) -> Tensor:
    """`x` in the type to compute in: half precision is too coarse for sums and exponentials, so float32 instead."""
    return x.float() if x.dtype in HALF else x


@cache
@torch.inference_mode(False)
def no_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, for whoever reads what nobody may read."""
    return torch.full((), torch.nan, dtype=dtype, device=device)


def placeholder(like: Tensor) -> Tensor:
    """What a product that is linear in it is differentiated in; its value is of no matter.

    It is not zero, because torch takes logarithms of the gradient at `logcumsumexp`, which have no derivative there.
    """
    return torch.ones_like(like, requires_grad=True)


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root with derivative 0, not infinity, at 0; NaN stays NaN, negative numbers become NaN."""
    if not is_differentiated():
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def at_once(size: int, device: torch.device) -> int:
    """How many things of `size` numbers a buffer holds; one at least."""
    return max(1, (CACHE if device.type == "cpu" else MEMORY) // max(1, size))


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are: they are if their sum is, which takes a part of the time, and may overflow."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def cancel(sums: Tensor, terms: Tensor) -> Tensor:
    """Where sums of terms of this size, in all, are rounding errors or not much more."""
    return sums < ROUNDINGS * torch.finfo(terms.dtype).eps * terms


def slices(total: int, step: int) -> Iterator[slice]:
    """Slices of so many things, each of `step` things but the last."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def chunks(total: int, size: int, device: torch.device) -> Iterator[slice]:
    """Slices of samples, as many at a time as a buffer holds with `size` numbers each."""
    return slices(total, at_once(size, device))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` `[..., K], [M, K] -> [..., M]`.

    Large products in float32 go to oneDNN where it is faster, which torch uses for convolutions alone.
    """
    turned = x.dim() == 2 and x.stride(1) != 1 and len(weight) >= NARROW
    if x.numel() * len(weight) < (WORTH_TURNING if turned else WORTH_ONEDNN) or not takes_onednn(x, weight):
        return torch.nn.functional.linear(x, weight)
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()  # oneDNN has no fast way for rows with gaps between them
    return onednn_linear(x, weight)


@cache
def has_wide_vectors() -> bool:
    """Whether the processor has vectors of 512 bits.

    On some of these the default library for matrix products does not use them, and oneDNN is twice as fast. On others
    both take the same time, but for turned operands, where oneDNN takes up to twice as long.
    """
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def takes_onednn(*operands: Tensor) -> bool:
    """Whether oneDNN shall multiply these."""
    return has_wide_vectors() and can_take_onednn(*operands)


def can_take_onednn(*operands: Tensor) -> bool:
    """Whether oneDNN can multiply these."""
    return (
        all(x.dtype is torch.float32 and x.device.type == "cpu" for x in operands)
        and torch.backends.mkldnn.is_available()
        and not is_differentiated()
    )


def go_one_by_one(multiplications: int) -> bool:
    """Whether products of a batch, each of so many multiplications, go to oneDNN one after the other."""
    return multiplications >= ONE_BY_ONE and has_wide_vectors()


def products(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """`x_b y_b^T` for every `b`: `[B, M, K], [B, N, K] -> [B, M, N]`; large ones one after the other, by oneDNN."""
    if not (go_one_by_one(x.shape[1:].numel() * y.shape[1]) and takes_onednn(x, y)):
        return torch.bmm(x, y.mT) if out is None else torch.bmm(x, y.mT, out=out)
    if len(x) == 1 and out is None:
        return linear(x[0], y[0])[None]
    out = x.new_empty(*x.shape[:2], y.shape[1]) if out is None else out
    for left, right, goal in zip(x, y, out, strict=True):
        goal.copy_(linear(left, right))
    return out


FEW_COLUMNS = 8
"""Up to how many columns torch takes one matrix after the other where a single one is multiplied with many."""


def times_each(matrix: Tensor, many: Tensor) -> Tensor:
    """`[V, G, O, I]` times `[N, G, I, T]`, each with each: `[V, N, G, O, T]`.

    Of few columns, all are those of one product: torch would read the matrix once for each of the `N`.
    """
    if many.shape[-1] > FEW_COLUMNS:
        return torch.matmul(matrix[:, None], many)
    return torch.einsum("vgoi,ngit->vngot", matrix, many)


def sum_of_squares(m: Tensor, weights: Tensor | None) -> Tensor:
    """`sum_v w_vn m_vn^2` of columns `[V, N, ...]`: `[N, ...]`. Large ones are not all squared at once."""
    columns = m.shape[0]
    if m.numel() < LARGE * max(1, columns):
        squares = wide(m).square()
        squares = squares if weights is None else squares * like_columns(weights, m)
        return squares[0] if columns == 1 else squares.sum(0)
    total = torch.zeros_like(wide(m[0]))
    for v, column in enumerate(m):
        x = wide(column)
        total.addcmul_(x if weights is None else x * like_columns(weights[v], column), x)
    return total


def sum_of_squared_rows(rows: Tensor, weights: Tensor | None, per_sample: bool) -> Tensor:
    """`sum_v w_vn rows_vn^2` of rows `[V, N, *p]`, with weights `[V, N]`: `[*p]`, or `[N, *p]` where `per_sample`."""
    squares = rows.square()
    squares = squares if weights is None else squares * like_columns(weights, squares)
    return squares.sum(0) if per_sample else squares.sum((0, 1))


def times_squares(left: Tensor, x: Tensor) -> Tensor:
    """`left^T x^2` `[O, I]`: a few samples at a time, so that squares stay in cache and no new memory is touched."""
    step = 4 * at_once(x.shape[1], x.device)
    if x.shape[0] <= step:
        return linear(left.T.contiguous(), x.square().T)  # a turned operand takes longer than to turn it
    total, buffer = left.new_zeros(left.shape[1], x.shape[1]), x.new_empty(step, x.shape[1])
    for some, factors in zip(x.split(step), left.split(step), strict=True):
        squares = torch.mul(some, some, out=buffer[: len(some)])
        total.addmm_(factors.T, squares)
    return total


def squares_of_rows(x: Tensor) -> Tensor:
    """Squared norms `[...]` of rows `[..., D]`; the way of `vecdot` costs less per call, and more per number."""
    if torch.is_grad_enabled() or x.numel() < FEW_NUMBERS:
        return torch.linalg.vecdot(x, x)
    return torch.linalg.vector_norm(x, dim=-1).square()


def like_columns(weights: Tensor, m: Tensor) -> Tensor:
    """Weights `[V, N]` for columns `[V, N, ...]`."""
    return weights.reshape(*weights.shape, *[1] * (m.dim() - weights.dim()))
