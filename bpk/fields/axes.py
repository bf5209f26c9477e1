"""Second moments of rows along each axis of a parameter, as Shampoo and SOAP keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.fields.statistics import Uses
from bpk.jacobians.core.gemm import gram
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.outer import Outer, pieces


def axis_moments(uses: Uses, most: int) -> list[Tensor]:
    """`sum_vn R R^T` `[d, d]` for each axis, with rows unfolded as `R` `[d, P / d]`; its diagonal if `d > most`."""
    shape = uses.param.shape or torch.Size([1])
    ways = as_matrix(uses, max(shape) <= most)
    if ways is not None:
        part, turned = ways
        found = [by_positions(part, side) for side in (False, True)]
        return found[::-1] if turned else found
    total = [uses.param.new_zeros([size] if size > most else [size, size]) for size in shape]
    for rows in uses.pieces():
        each = [
            moment(rows.reshape(-1 if rows.numel() else 0, *shape), axis, size > most)
            for axis, size in enumerate(shape)
        ]
        total = [a + b for a, b in zip(total, each, strict=True)]
    return total


def moment(rows: Tensor, axis: int, only_diagonal: bool) -> Tensor:
    """Of rows `[B, *p]`."""
    unfolded = rows.movedim(1 + axis, 0).flatten(1)
    return unfolded.square().sum(1) if only_diagonal else gram(unfolded)


def as_matrix(uses: Uses, whole: bool) -> tuple[Outer, bool] | None:
    """Rows as outer products of a parameter that is a matrix (or its transpose), where these are cheaper than rows."""
    if not whole or uses.param.dim() != 2 or len(uses.outers) != 1:
        return None
    part = uses.outers[0]
    _, _, groups, o, i, t = part.shape
    if groups > 1 or 2 * t * t * (i + o) + t * (o * o + i * i) > t * i * o + o * i * (o + i):
        return None
    numbers = torch.arange(uses.param.numel(), device=uses.param.device).view(uses.param.shape)
    seen = part.matrix(numbers)[0]
    if torch.equal(seen, numbers):
        return part, False
    return (part, True) if torch.equal(seen, numbers.T) else None


def by_positions(part: Outer, of_patches: bool) -> Tensor:
    """`sum_n m_n (a_n^T a_n) m_n^T`, or with columns `m` and patches `a` exchanged."""
    v, n, _, o, i, t = part.shape
    size = i if of_patches else o
    total = wide(part.columns[:, :0]).new_zeros(size, size)
    for some in pieces(0, n, v * t * (t + o + i)):
        m = wide(part.columns[:, some, 0]).flatten(0, 1)  # [V B, O, T]
        a = wide(part.patches(some)[:, 0]).repeat(v, 1, 1)  # [V B, I, T]
        left, right = (a, m) if of_patches else (m, a)
        weighted = left @ (right.mT @ right)
        total = total + torch.einsum("bot,bpt->op", weighted, left)
    return total
