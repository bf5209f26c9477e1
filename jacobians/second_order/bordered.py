"""Residuals with a zero corner, `[[A, B], [B^T, 0]]`: a layer that is linear in its parameters, or in its inputs.

Of the entries of both sides, those of one (`corner`) are enumerated: their rows `(A_j, B_j)` are all that there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.numeric import is_differentiated, slices, wide
from bpk.jacobians.core.products import Differentiable, Residual
from bpk.jacobians.core.side_by_side import as_rows, beside, taken_apart

UNITS = 1 << 22
"""How many numbers the unit vectors have whose products are taken at a time."""


def corner(rule: Differentiable, call: Call, wrts: Sequence[Wrt]) -> tuple[Wrt, ...]:
    """The smallest part of `wrts` without which the residual is zero; nothing, where there is none.

    Tried are the inputs, and each of `wrts` alone.
    """
    inputs = tuple(w for w in wrts if isinstance(w, int))
    tried = sorted({inputs, *((w,) for w in wrts)}, key=lambda part: (entries(call, part), str(part)))
    for part in tried:
        rest = tuple(w for w in wrts if w not in part)
        if part and rest and rule.residual(call, rest) is Residual.ZERO:
            return part
    return ()


def entries(call: Call, wrts: Sequence[Wrt]) -> int:
    """How many numbers `wrts` have per sample."""
    return sum(call.sample_shape(w).numel() for w in wrts)


def rows_by_sample(
    rule: Differentiable, call: Call, grad_out: Tensor, part: Sequence[Wrt], wrts: Sequence[Wrt]
) -> dict[Wrt, Tensor]:
    """The residual times the unit vectors of `part`, for one sample after the other: `{b: [D, N, *b]}` for `wrts`."""
    sizes = [call.sample_shape(a).numel() for a in part]
    eye = torch.eye(sum(sizes), dtype=call.output.dtype, device=call.output.device)
    zero = call.output.new_zeros(())
    units = dict(zip(part, eye.split(sizes, 1), strict=True))
    mats: dict[Wrt, Tensor] = {}
    for b in wrts:
        shape = (len(eye), *([1] if isinstance(b, int) else []), *call.sample_shape(b))
        mats[b] = units[b].reshape(shape) if b in units else zero.expand(shape)
    rows: dict[Wrt, list[Tensor]] = {b: [] for b in wrts}
    for n in range(call.batch_size):
        product = rule.residual_mat_prod(call.subset([n]), grad_out[n : n + 1], mats)
        for b in wrts:
            rows[b].append(product[b][:, 0] if isinstance(b, int) else product[b])
    return {b: torch.stack(parts, 1) for b, parts in rows.items()}


def diagonal_by_sample(rule: Differentiable, call: Call, grad_out: Tensor, param: str) -> Tensor:
    """The diagonal `[N, *p]` of every sample's residual in a parameter, by products with unit vectors."""
    shape, like = call.sample_shape(param), call.output
    found = [like.new_zeros(0)]
    for n in range(call.batch_size):
        alone, grad = call.subset([n]), grad_out[n : n + 1]
        for here in slices(shape.numel(), max(1, UNITS // max(1, shape.numel()))):
            at = torch.arange(here.start, here.stop, device=like.device)
            units = one_hot(at, shape.numel()).to(like.dtype).view(-1, *shape)
            rows = as_rows(rule.residual_mat_prod(alone, grad, {param: units})[param])
            found.append(rows.gather(1, at[:, None])[:, 0])
    return torch.cat(found).view(call.batch_size, *shape)


def polarised_residual(
    rule: Differentiable, call: Call, grad_out: Tensor, wrts: Sequence[Wrt]
) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Columns `{wrt: [K, N, *wrt]}` and signs `[K, N]` of the residual that have its derivatives everywhere.

    Eigenvectors have none where eigenvalues are the same, roots of eigenvalues none where these are zero, as all are
    where no gradient comes.
    """
    rows = beside(rows_by_sample(rule, call, grad_out, wrts, wrts).values(), 2)
    columns, signs = polarised(rows / 2, torch.arange(len(rows), device=rows.device))
    return taken_apart(columns, {w: call.sample_shape(w) for w in wrts}, 2), signs


def with_border(side: Tensor, border: Tensor) -> Tensor:
    """`[[A, B], [B^T, 0]]` of `A` `[..., D, D]` and `B` `[..., D, P]`."""
    zero = border.new_zeros(*border.shape[:-2], border.shape[-1], border.shape[-1])
    return torch.cat([torch.cat([side, border], -1), torch.cat([border.mT, zero], -1)], -2)


def compressed(side: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[..., D + r, D + r]` with the eigenvalues of `[[A, B], [B^T, 0]]` (but for zeros), and `[..., P, r]`.

    With `B^T = Q T` (QR) it is `[[A, T^T], [T, 0]]`, in the basis of the first `D` entries and the columns of `Q`.
    """
    basis, upper = (part.to(border.dtype) for part in torch.linalg.qr(wide(border.mT)))  # half precision has no QR
    return with_border(side, upper.mT), basis


class Bordered:
    """The rows of the residual that belong to `part`, one of its corners: `{wrt: [D, N, *wrt]}`."""

    def __init__(
        self, rule: Differentiable, call: Call, grad_out: Tensor, wrts: Sequence[Wrt], part: Sequence[Wrt]
    ) -> None:
        found = [rule.residual_rows(call, grad_out, a, wrts) for a in part]
        self.part, self.wrts = tuple(part), tuple(wrts)
        self.shapes = {w: call.sample_shape(w) for w in (*part, *(w for w in wrts if w not in part))}
        self.rows = {w: torch.cat([rows[w] for rows in found]) if found[1:] else found[0][w] for w in self.shapes}

    def signed_columns(self) -> tuple[dict[Wrt, Tensor], Tensor]:
        """Columns `[K, N, *wrt]` and signs `[K, N]` without an eigendecomposition, `w_j = (A_j / 2, B_j)` at `e_j`."""
        halves = beside([x / 2 if w in self.part else x for w, x in self.rows.items()], 2)
        alive = nonzero(halves)
        columns, signs = polarised(halves[alive], alive)
        found = taken_apart(columns, self.shapes, 2)
        return {w: found[w] for w in self.wrts}, signs

    @property
    def length(self) -> int:
        """`D`, the number of entries of `part`."""
        return len(self.rows[self.part[0]])

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """A matrix `[N, D + r, D + r]` with the same eigenvalues (but for zeros), and a basis `[N, P, r]` of its rest.

        Where that does not make it smaller, or where it is to be differentiated, it is the residual itself.
        """
        whole = beside(self.rows.values(), 2).transpose(0, 1)  # [N, D, D + P]
        side, border = whole.split([self.length, whole.shape[2] - self.length], 2)
        if border.shape[2] > self.length and not is_differentiated():
            return compressed(side, border)
        return with_border(side, border), None

    def parts(self, columns: Tensor, basis: Tensor | None) -> dict[Wrt, Tensor]:
        """Columns `[K, N, D + r]` of such a matrix as `[K, N, *wrt]`."""
        if basis is not None:
            own, rest = columns.split([self.length, columns.shape[2] - self.length], 2)
            columns = torch.cat([own, torch.einsum("npr,knr->knp", basis, rest)], 2)
        found = taken_apart(columns, self.shapes, 2)
        return {w: found[w] for w in self.wrts}


def nonzero(rows: Tensor) -> Tensor:
    """The numbers of those rows `[K, N, L]` that are not zero (at least one, so that something travels)."""
    alive = (rows.detach() != 0).flatten(1).any(1)
    alive[:1] = True
    return (torch.ones_like(alive) if is_differentiated() else alive).nonzero()[:, 0]


def polarised(rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_j e_j w_j^T + w_j e_j^T` as columns `[2 K, N, L]` with signs `[2 K, N]`, for rows `w_j` `[K, N, L]`.

    `at` `[K]` says which unit vector `e_j` a row belongs to, and

        e w^T + w e^T = 1/2 (c e + w/c) (c e + w/c)^T - 1/2 (c e - w/c) (c e - w/c)^T

    for any constant `c`; `c = sqrt|w|` makes both terms of a column equally long, and zero where `w` is: rows that feed
    no loss, whose sample is not known, must not get any. Where `w` has derivatives, it may not be zero.
    """
    size = norms(rows.detach())  # |w_j|: [K, N]
    size = torch.where(size == 0, 1.0, size) if is_differentiated() else size
    scale = size.sqrt() * 2**-0.5  # c / sqrt(2)
    apart = torch.where(size == 0, 1.0, scale)
    turns = torch.stack([apart, -apart], 1).reciprocal().to(rows.dtype) / 2  # 1 / (sqrt(2) c) and its negative
    columns = rows[:, None] * turns[..., None]  # [K, 2, N, L]: side by side, so that sums of squares cancel at once
    columns = columns.scatter_add(3, at[:, None, None, None].expand(*columns.shape[:3], 1), units(scale, columns))
    ones = torch.ones_like(size, dtype=rows.dtype)
    return columns.flatten(0, 1), torch.stack([ones, -ones], 1).flatten(0, 1)


def units(scale: Tensor, columns: Tensor) -> Tensor:
    """What columns `[K, 2, N, L]` have at the entry of their unit vector: `[K, 2, N, 1]`."""
    return scale[:, None, :, None].expand(*columns.shape[:3], 1).to(columns.dtype)


def norms(x: Tensor) -> Tensor:
    """Along the last axis, in no less than single precision."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
