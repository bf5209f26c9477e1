"""Products, determinants and solutions as compositions, while derivatives of derivatives are taken by forward mode.

Torch's formulas for these (seen in 2.13) read a factorisation that was computed beside the result, or divide what they
need by entries that are zero: `jvp` of `jvp` is silently wrong. Where a matrix of more than three rows is singular,
compositions give NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def product(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """`torch.prod`: halves times halves, which is a polynomial where entries are zero, too."""
    x = input if dtype is None else input.to(dtype)
    x, axis = (x.flatten(), 0) if dim is None else (x, dim)
    if not x.dim() or not x.shape[axis]:
        return torch.prod(x, axis, keepdim)
    while (size := x.shape[axis]) > 1:
        half = size // 2
        halves = x.narrow(axis, 0, half) * x.narrow(axis, half, half)
        x = torch.cat([halves, x.narrow(axis, size - 1, 1)], axis) if size % 2 else halves
    return x if keepdim else x.squeeze(axis)


def cumulative_product(input: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """`torch.cumprod`."""
    x = input if dtype is None else input.to(dtype)
    if not x.dim() or not x.shape[dim]:
        return torch.cumprod(x, dim)
    found = [*x.unbind(dim)]
    for k in range(1, len(found)):
        found[k] = found[k - 1] * found[k]
    return torch.stack(found, dim)


def det(A: Tensor) -> Tensor:
    """`torch.linalg.det`."""
    size = A.shape[-1]
    if size == 0:
        return torch.linalg.det(A)
    if size <= 3:  # a polynomial in the entries, also of singular matrices
        a = A[..., 0, :]
        if size == 1:
            return a[..., 0]
        b = A[..., 1, :]
        if size == 2:
            return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
        return (a * torch.linalg.cross(b, A[..., 2, :])).sum(-1)
    pivots, sign = of_factors(A)
    return sign * product(pivots, -1)


def slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.slogdet`."""
    if A.shape[-1] <= 3:
        found = det(A)
        return phase(found), found.abs().log()
    pivots, sign = of_factors(A)
    return sign * product(phase(pivots), -1), pivots.abs().log().sum(-1)


def phase(x: Tensor) -> Tensor:
    """`x / |x|`, which has a derivative where numbers are complex."""
    return x.sgn() if x.is_complex() else x.sgn().detach()


def logdet(A: Tensor) -> Tensor:
    """`torch.logdet`."""
    sign, found = slogdet(A)
    if sign.is_complex():
        return sign.log() + found
    return torch.where(sign < 0, torch.nan, found)


def of_factors(A: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal of `U` and the sign of the permutation in `A = P L U`."""
    factors, swaps = torch.linalg.lu_factor(A)
    moved = (swaps != torch.arange(1, A.shape[-1] + 1, device=A.device)).sum(-1)
    return factors.diagonal(dim1=-2, dim2=-1), 1 - 2 * (moved % 2).to(A.dtype)


def solve(A: Tensor, B: Tensor, *, left: bool = True, out: Any = None) -> Tensor:
    """`torch.linalg.solve`."""
    one = B.dim() == 1 or (A.dim() - 1 == B.dim() and A.shape[:-1] == B.shape)
    columns = B.unsqueeze(-1) if one else B
    found = torch.linalg.lu_solve(*torch.linalg.lu_factor(A), columns, left=left)
    return found.squeeze(-1) if one else found


def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """`torch.cholesky_inverse`, whose first derivative by forward mode is wrong already."""
    return torch.cholesky_solve(torch.eye(L.shape[-1], dtype=L.dtype, device=L.device), L, upper)


ALGEBRA: dict[Any, Callable[..., Any]] = {
    torch.prod: product,
    Tensor.prod: product,
    torch.cumprod: cumulative_product,
    Tensor.cumprod: cumulative_product,
    torch.det: det,
    Tensor.det: det,
    torch.linalg.det: det,
    torch.slogdet: slogdet,
    Tensor.slogdet: slogdet,
    torch.linalg.slogdet: slogdet,
    torch.logdet: logdet,
    Tensor.logdet: logdet,
    torch.linalg.solve: solve,
    torch.cholesky_inverse: cholesky_inverse,
    Tensor.cholesky_inverse: cholesky_inverse,
}
"""What stands for a function."""

NOT_TWICE = (
    *(torch.linalg.solve_ex, torch.linalg.tensorsolve),
    *(torch.linalg.householder_product, torch.orgqr, Tensor.orgqr),
)
"""Functions whose second derivatives by forward mode are wrong, and for which nothing stands."""

NOT_THRICE = (torch.linalg.eig, torch.linalg.eigvals)
"""The same of third derivatives: torch's formula for the first one solves by `torch.linalg.solve_ex`."""
