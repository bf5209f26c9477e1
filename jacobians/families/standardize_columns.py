"""The second derivative of `x̂` with statistics of groups, as columns; see `standardize.py` for its formula."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.near_diagonal import NearDiagonal, beside_each_other, paired
from bpk.jacobians.core.numeric import safe_sqrt, wide
from bpk.jacobians.families.standardize import GroupStatistics

PER_GROUP = 4
"""How many columns a group has beside its diagonal, at most."""


def eigenvectors(known: GroupStatistics, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonal columns of `R` in closed form: `[G (D + 2), N, *in]`, and signs `[G (D + 2), N]`.

    In the plane of `x̂` and `h`, `R` is a symmetric 2 x 2 matrix; its eigenvectors make two columns. On what
    `P` leaves orthogonal to the plane, it is `-(r^2 c / D)` times the projector `Q`, the sum of the
    products of its columns: `Q = Q Q^T`.
    """
    x, r = known.unit.double(), known.rstd.double()
    h = known.project(known.fold(grad[None])[0].double())
    first, length = direction(x)
    rest = h - first * (first * h).sum(1, keepdim=True)
    rest = known.project(rest - first * (first * rest).sum(1, keepdim=True))
    small = rest.square().sum(1, keepdim=True) <= torch.finfo(torch.float64).eps * h.square().sum(1, keepdim=True)
    second, height = direction(torch.where(small, torch.zeros_like(rest), rest))

    scale = -r.square() / known.size
    flat = scale * (h * x).sum(1, keepdim=True)
    top, bottom = 3 * flat * (1 - length.square() / known.size), torch.where(small, 0.0, flat)
    (upper, lower), (cos, sin) = plane(top, scale * length * height, bottom)
    basis = torch.eye(known.size, dtype=x.dtype, device=x.device)
    outside = known.project(basis) - first[:, :, None] * first[:, None, :] - second[:, :, None] * second[:, None, :]
    inside = ((first * cos + second * sin, upper), (second * cos - first * sin, lower))
    scaled = [(vector * safe_sqrt(value.abs()))[:, None] for vector, value in inside]
    vectors = torch.cat([outside * safe_sqrt(flat.abs())[:, :, None], *scaled], 1)  # [B, K, D]
    signs = torch.cat([flat.expand(-1, known.size), upper, lower], 1).sign().detach().nan_to_num(nan=1.0)
    vectors, signs = (part.unflatten(0, (known.shape[0], known.groups)) for part in (vectors, signs))
    columns = known.unfold(beside_each_other(vectors))
    return columns.to(grad.dtype), signs.permute(1, 2, 0).flatten(0, 1).to(grad.dtype)


def near_diagonal(known: GroupStatistics, grad: Tensor, diag: Tensor | None) -> NearDiagonal:
    """`J diag(d) J + R` of `x̂`, for a diagonal (`None`: zero) and a gradient `[N, *in]` there.

    With `Q = (1, x̂) / sqrt(D)` (`x̂` alone where the mean is not subtracted), `J = r (I - Q Q^T)`, and

        R = -(r^2 / D) (h x̂^T + x̂ h^T + c I - c 1 1^T / D - (3 c / D) x̂ x̂^T).
    """
    x, squared = known.unit, known.rstd.square()
    shares = [torch.ones_like(x), x] if known.centred else [x]
    basis = torch.stack(shares, 1) / known.divisor**0.5  # [B, J, D]
    h = known.project(known.fold(wide(grad)[None])[0])
    flat = squared * (h * x).sum(1, keepdim=True) / known.divisor  # r^2 c / D
    sizes = [flat, 3 * flat] if known.centred else [3 * flat]
    partner = basis * torch.stack(sizes, 1) / 2
    partner[:, -1] -= squared * h / known.divisor**0.5
    values = -flat.expand_as(x)
    if diag is not None:
        inner = known.fold(wide(diag)[None])[0] * squared
        spread = inner[:, None] * basis
        partner += (basis @ spread.mT).mT @ basis / 2 - spread
        values = values + inner
    columns, signs = paired(basis, partner)
    columns = beside_each_other(columns.unflatten(0, (known.shape[0], known.groups)))
    return NearDiagonal(
        known.unfold(values[None])[0].to(grad.dtype),
        known.unfold(columns).to(grad.dtype),
        signs.repeat(known.groups)[:, None].expand(-1, known.shape[0]).to(grad.dtype),
    )


def direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors `[B, D]` divided by their lengths (zero stays zero), and the lengths `[B, 1]`."""
    length = safe_sqrt(rows.square().sum(1, keepdim=True))
    return rows / torch.where(length == 0, 1.0, length), length


def plane(top: Tensor, side: Tensor, bottom: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Eigenvalues of `[[top, side], [side, bottom]]`, and the cosine and sine of the first eigenvector's angle."""
    mean, half = (top + bottom) / 2, (top - bottom) / 2
    round_ = (half == 0) & (side == 0)
    angle = torch.atan2(torch.where(round_, 0.0, side), torch.where(round_, 1.0, half)) / 2
    spread = safe_sqrt(half.square() + side.square())
    return (mean + spread, mean - spread), (angle.cos(), angle.sin())
