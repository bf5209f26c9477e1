"""Symmetric matrices as signed columns, `R = sum_k s_k u_k u_k^T`: second derivatives that nobody has declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.numeric import is_differentiated, wide
from bpk.jacobians.core.products import Differentiable
from bpk.jacobians.core.side_by_side import as_rows, beside, taken_apart
from bpk.jacobians.second_order.bordered import Bordered, corner, rows_by_sample
from bpk.jacobians.second_order.structure import Couplings, Product, components, connected, dense_blocks

BALANCE = 4
"""How many times rows are scaled by the root of their largest entry; a ratio is then its 16th root."""

ROUNDINGS = 4
"""Up to so many roundings of the largest eigenvalue, in the type of a matrix, another one is zero."""

LARGE = 48
"""From how many rows a matrix is looked at for blocks before it is decomposed."""


def factor(dense: Tensor, balanced: bool = False) -> tuple[Tensor, Tensor]:
    """Eigendecompose symmetric matrices `[N, D, D]` into columns `[K, N, D]` and signs `[K, N]`.

    Columns that are zero up to rounding, which is that of the largest eigenvalue, are left out, so that `K` is the
    largest rank; double precision tells these from small ones. A matrix with NaN or infinite entries gives NaN columns;
    it leaves the other samples alone, and so does one of zeros, also in derivatives. Columns that are `balanced` are no
    eigenvectors, but those of the matrix whose rows have been scaled to about the same size (Ruiz, 2001), scaled back:
    rounding is that of each row then.
    """
    seen = used_rows(dense)
    if seen is not None:
        columns, signs = factor(dense[:, seen[:, None], seen], balanced)
        return columns.new_zeros(*columns.shape[:2], dense.shape[1]).index_copy(2, seen, columns), signs
    symmetric = ((dense + dense.transpose(1, 2)) / 2).double()
    scale = None
    if balanced and not is_differentiated() and symmetric.numel():
        scale = symmetric.new_ones(symmetric.shape[:2])
        for _ in range(BALANCE):
            step = torch.ldexp(torch.ones_like(scale), torch.frexp(symmetric.abs().amax(2))[1] // 2)  # a power of two
            symmetric, scale = symmetric / (step[:, :, None] * step[:, None]), scale * step
    finite = symmetric.isfinite().flatten(1).all(1)[:, None]
    regular = finite & (symmetric != 0).flatten(1).any(1, keepdim=True)
    numbers = torch.arange(1, symmetric.shape[1] + 1, dtype=symmetric.dtype, device=symmetric.device)
    distinct = numbers.diag()  # its eigenvectors have derivatives
    values, basis = block_by_block(torch.where(regular[..., None], symmetric, distinct))
    size = values.abs()
    rounding = ROUNDINGS * torch.finfo(wide(dense[:0]).dtype).eps
    kept = regular & (size > rounding * (size.amax(1, keepdim=True) if size.numel() else size))
    roots, signs = torch.where(kept, torch.where(kept, size, 1.0).sqrt(), 0.0), torch.where(kept, values.sign(), 0.0)
    if not is_differentiated() and values.numel():
        order = roots.argsort(1, descending=True)[:, : max(1, int(kept.sum(1).max()))]
        roots, signs = roots.gather(1, order), signs.gather(1, order)
        basis = basis.gather(2, order[:, None].expand(-1, basis.shape[1], -1))
    columns = (basis * roots[:, None, :]).permute(2, 0, 1)
    columns = columns if scale is None else columns * scale
    return torch.where(finite, columns, torch.nan).to(dense.dtype), signs.T.to(dense.dtype)


def used_rows(dense: Tensor) -> Tensor | None:
    """Which rows of matrices `[N, D, D]` are not zero in all of them (`None`: all, none, or not worth a look).

    Functions that take a part of a parameter (the weights of one expert) leave the rows of the others zero.
    """
    if dense.shape[1] < LARGE or is_differentiated():
        return None
    joined = (dense != 0).any(0)
    used = (joined.any(0) | joined.any(1)).nonzero()[:, 0]
    return used if 0 < len(used) < len(joined) else None


def block_by_block(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[N, D]` and eigenvectors `[N, D, D]`, where all matrices together may fall into blocks."""
    n, size = matrices.shape[:2]
    joined = torch.ones(()) if size < LARGE or is_differentiated() else (matrices != 0).any(0)
    if joined.all():
        return eigh(matrices)
    values, basis = matrices.new_zeros(n, size), torch.zeros_like(matrices)
    for at in components(joined):
        rows, columns = at[:, :, None], at[:, None, :]
        found, vectors = eigh(matrices[:, rows, columns])
        values[:, at], basis[:, rows, columns] = found, vectors
    return values, basis


def residual_columns(
    rule: Differentiable, call: Call, grad_out: Tensor, wrts: Sequence[Wrt], balanced: bool = False
) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Eigendecompose the residual of every sample, jointly over `wrts` (`balanced`: see `factor`).

    Inputs may fall into blocks (layers that act on one axis), which are decomposed one by one. A layer that is linear
    in its parameters, or in its inputs, leaves a corner of the residual zero, which need not be computed.
    """
    shapes = {w: call.sample_shape(w) for w in wrts}
    if all(isinstance(w, int) for w in wrts) and not is_differentiated():
        vectors, signs = _columns_of_blocks(rule, call, grad_out, shapes, balanced)
    elif part := corner(rule, call, wrts):
        bordered = Bordered(rule, call, grad_out, wrts, part)
        small, basis = bordered.dense()
        vectors, signs = factor(small, balanced)
        return bordered.parts(vectors, basis), signs
    else:
        rows = rows_by_sample(rule, call, grad_out, wrts, wrts)
        vectors, signs = factor(beside(rows.values(), 2).transpose(0, 1), balanced)
    return taken_apart(vectors, shapes, 2), signs


def _columns_of_blocks(
    rule: Differentiable, call: Call, grad_out: Tensor, shapes: Mapping[Wrt, torch.Size], balanced: bool
) -> tuple[Tensor, Tensor]:
    """Columns `[K, N, D]` and signs over flattened inputs.

    The first sample shows the blocks; a random column tells if all have the same.
    """
    total = sum(shape.numel() for shape in shapes.values())
    width = max(total, call.output[:1].numel())
    first = slice(0, 1)

    def product(call: Call, grad_out: Tensor) -> Product:
        def times(columns: Sequence[Tensor]) -> list[Tensor]:
            found = rule.residual_mat_prod(call, grad_out, taken_apart(columns[0], shapes, 2))
            return [beside([found[w] for w in shapes], 2)]

        return times

    of_all, whole = product(call, grad_out), torch.arange(total, device=grad_out.device)[None]
    inner = dense_blocks(product(call.subset([0]), grad_out[first]), whole, grad_out[first], width)
    at = connected(inner[0, 0])
    if call.batch_size == 1:
        inner = inner[:, 0][:, at[:, :, None], at[:, None, :]]
    else:
        block = torch.empty_like(whole[0]).scatter_(0, at.flatten(), torch.arange(total, device=at.device))
        shape = torch.Size((call.batch_size, total))
        if len(at) > 1 and not Couplings(of_all, [shape], grad_out).none_between([block // at.shape[1]], len(at)):
            at = whole
        inner = dense_blocks(of_all, at, grad_out, width)
    (n, count), size = inner.shape[:2], inner.shape[2]
    vectors, signs = factor(inner.reshape(n * count, size, size), balanced)
    vectors = vectors.unflatten(1, (n, count)).permute(2, 0, 1, 3)  # [B, K, N, S]
    columns = grad_out.new_zeros(count, len(signs), n, total)
    columns.scatter_(3, at[:, None, None, :].expand_as(vectors), vectors)
    return columns.flatten(0, 1), signs.unflatten(1, (n, count)).permute(2, 0, 1).flatten(0, 1)


def of_diagonal(diag: Tensor) -> tuple[Tensor, Tensor]:
    """Columns `[D, N, *in]` and signs `[D, N]` of diagonal matrices `[N, *in]`."""
    roots, signs = signed_roots(diag)
    return one_hot(roots), as_rows(signs).T


def signed_roots(x: Tensor) -> tuple[Tensor, Tensor]:
    """Roots `r` and signs `s` with `s r^2 = x`, also in derivatives: those of a root end where an entry is zero."""
    if not is_differentiated():
        return x.abs().sqrt(), x.sign()
    roots = torch.where(x == 0, 1.0, x.abs()).sqrt().detach()
    return roots, x / roots.square()


def one_hot(x: Tensor) -> Tensor:
    """`[N, *in]` spread over one column for each entry: `[D, N, *in]`."""
    rows = as_rows(x)
    return rows.diag_embed().transpose(0, 1).reshape(rows.shape[1], *x.shape)
