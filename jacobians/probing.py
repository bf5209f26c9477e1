"""The structure of a layer's derivatives at one call, found by multiplying with a few random columns.

If `A` is a matrix and `u`, `v` are random vectors with continuous distributions, then `A u = 0` only if `A = 0`, and
`(A u) / u = (A v) / v` only if `A` is diagonal, with probability one; up to rounding, both say so about the size of
what `A` has besides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.call import Call, Wrt
from bpk.jacobians.rule import Residual, Rule

SEED = 20
ROUNDINGS = 64
"""How many roundings may lie between two results that are the same."""
SHORT = 1e-4
"""From which rounding on nothing is concluded from equal results (float16, bfloat16)."""


def draw(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Numbers between 1/2 and 3/2 with random signs, of a generator of its own."""
    generator = torch.Generator().manual_seed(SEED + seed)
    size = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) + 0.5
    signs = torch.randint(2, tuple(shape), generator=generator) * 2 - 1
    return (size * signs).to(like.device, like.dtype)


def tolerance(like: Tensor) -> float:
    """Up to which relative difference results count as the same: none, in formats too short to tell."""
    eps = torch.finfo(like.dtype).eps
    return ROUNDINGS * eps if eps < SHORT else -1.0


def precision(x: Tensor) -> torch.dtype:
    """The coarsest dtype that holds a tensor: under autocast, it has been converted since it was computed."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(x.to(dtype).to(x.dtype).nan_to_num(), x.nan_to_num()):
            return dtype
    return x.dtype


def residual(rule: Rule, call: Call, wrts: Sequence[Wrt]) -> Residual:
    """The structure of the second derivative: zero, diagonal in the input, or general."""
    from bpk.jacobians.autodiff import residual_mat_prod

    out = call.output
    if not out.numel():
        return Residual.GENERAL
    columns = {w: draw((2, *call.shape_of(w)), out, k) for k, w in enumerate(wrts)}
    bent = residual_mat_prod(rule, call, draw(out.shape, out, len(columns)), columns)
    if all(not part.any() for part in bent.values()):
        return Residual.ZERO
    if tuple(wrts) == (0,) and is_diagonal(bent[0], columns[0]):
        return Residual.DIAGONAL
    return Residual.GENERAL


def is_diagonal(products: Tensor, columns: Tensor) -> bool:
    """Whether two products `[2, N, *in]` are those of one diagonal matrix per sample with the columns."""
    first, second = (products / columns).reshape(*products.shape[:2], -1)
    scale = first.abs().amax(1, keepdim=True) if first.numel() else first
    return bool(((first - second).abs() <= tolerance(first) * scale).all())


def same_for_all(rule: Rule, call: Call, wrt: Wrt) -> bool:
    """Whether all samples have the same Jacobian."""
    out = call.output
    if call.batch_size < 2 or not out.numel():
        return False
    column = draw((1, 1, *out.shape[1:]), out, 0).expand(1, *out.shape)
    rows = rule.jac_t_mat_prod(call, column, wrt, sum_batch=False)[0].reshape(call.batch_size, -1)
    return bool(((rows - rows[:1]).abs() <= tolerance(rows) * rows.abs().max()).all())


def slopes(rule: Rule, call: Call) -> Tensor | None:
    """The diagonals `[N, D]` of the Jacobians with respect to the input, or `None` if they are not diagonal."""
    out = call.output
    if out.shape != call.inputs[0].shape or not out.numel():
        return None
    columns = draw((2, *out.shape), out, 0)
    products = rule.jac_t_mat_prod(call, columns, 0)
    return (products / columns)[0].reshape(len(out), -1) if is_diagonal(products, columns) else None
