"""Symmetric matrices as signed columns, `R = sum_k s_k u_k u_k^T`: second derivatives that nobody has declared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.autodiff_graph import is_differentiated
from bpk.jacobians.bordered import Bordered, corner
from bpk.jacobians.call import Call, Wrt
from bpk.jacobians.probing import draw, tolerance
from bpk.jacobians.rule import Rule

BLOCK = 1 << 22
"""How many numbers dense second derivatives hold at most while they are multiplied."""


def factor(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecompose symmetric matrices `[N, D, D]` into columns `[K, N, D]` and signs `[K, N]`.

    Columns that are zero up to rounding are left out, so that `K` is the largest rank. A matrix with NaN or infinite
    entries gives NaN columns, and leaves the other samples alone.
    """
    wide = (dense + dense.transpose(1, 2)) / 2
    wide = wide.float() if dense.dtype in (torch.bfloat16, torch.float16) else wide
    healthy = torch.isfinite(wide).flatten(1).all(1)
    values, basis = torch.linalg.eigh(torch.where(healthy[:, None, None], wide, torch.zeros_like(wide)))
    if not is_differentiated() and values.numel():
        size, order = values.abs().sort(1, descending=True)
        rounding = 4 * torch.finfo(values.dtype).eps * size.shape[1]
        rank = max(1, int((size > rounding * size[:, :1]).sum(1).max()))
        order = order[:, :rank]
        values, basis = values.gather(1, order), basis.gather(2, order[:, None].expand(-1, basis.shape[1], -1))
    columns = (basis * values.abs().sqrt()[:, None, :]).permute(2, 0, 1)
    columns = torch.where(healthy[None, :, None], columns, torch.full_like(columns, torch.nan))
    return columns.to(dense.dtype), values.sign().T.to(dense.dtype)


def residual_columns(rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt]) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Eigendecompose the residual of every sample, jointly over `wrts`.

    Inputs may fall into blocks (layers that act on one axis), which are decomposed one by one. A layer that is linear
    in its parameters, or in its inputs, leaves a corner of the residual zero, which need not be computed.
    """
    shapes = [call.shape_of(w)[1:] if isinstance(w, int) else call.shape_of(w) for w in wrts]
    if all(isinstance(w, int) for w in wrts) and not is_differentiated():
        vectors, signs = _columns_of_blocks(Dense(rule, wrts, shapes), call, grad_out)
    elif part := corner(rule, call, wrts):
        bordered = Bordered(rule, call, grad_out, wrts, part)
        small, basis = bordered.dense()
        vectors, signs = factor(small)
        return bordered.parts(vectors, basis), signs
    else:
        dense = [_dense_residual(rule, call, grad_out, wrts, shapes, n) for n in range(call.batch_size)]
        vectors, signs = factor(torch.stack(dense))
    parts = vectors.split([s.numel() for s in shapes], dim=2)
    columns = {w: part.reshape(*part.shape[:2], *s) for w, s, part in zip(wrts, shapes, parts, strict=True)}
    return columns, signs


class Dense:
    """Residuals over the flattened, concatenated inputs `wrts`: products, and blocks `[N, B, S, S]`."""

    def __init__(self, rule: Rule, wrts: Sequence[Wrt], shapes: Sequence[torch.Size]) -> None:
        self.rule, self.wrts, self.shapes = rule, wrts, shapes
        self.splits = [s.numel() for s in shapes]

    def times(self, call: Call, grad_out: Tensor, columns: Tensor) -> Tensor:
        """`[V, N, D] -> [V, N, D]`."""
        parts = zip(self.wrts, self.shapes, columns.split(self.splits, 2), strict=True)
        mats = {w: part.reshape(*part.shape[:2], *s) for w, s, part in parts}
        product = self.rule.residual_mat_prod(call, grad_out, mats)
        return torch.cat([product[w].reshape(*columns.shape[:2], -1) for w in self.wrts], 2)

    def inside(self, call: Call, grad_out: Tensor, at: Tensor) -> Tensor:
        """What lies in the blocks of indices `at` `[B, S]`: a column for each of the `S` serves all blocks at once."""
        (count, size), n, total = at.shape, call.batch_size, sum(self.splits)
        found = grad_out.new_empty(n, count, size, size)
        step = max(1, BLOCK // max(1, n * max(total, call.output[:1].numel())))
        for first in range(0, size, step):
            part = at[:, first : first + step].T  # [V, B]
            units = grad_out.new_zeros(len(part), total).scatter_(1, part, 1.0)
            product = self.times(call, grad_out, units[:, None].expand(-1, n, -1))
            found[..., first : first + step] = product[:, :, at].permute(1, 2, 3, 0)
        return found


def _columns_of_blocks(dense: Dense, call: Call, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Columns `[K, N, D]` and signs. The first sample shows the blocks; a random column tells if all have the same."""
    total = sum(dense.splits)
    whole = torch.arange(total, device=grad_out.device)[None]
    first = dense.inside(call.subset([0]), grad_out[:1], whole)
    at = blocks(first[0, 0])
    if call.batch_size == 1:
        inner = first[:, 0][:, at[:, :, None], at[:, None, :]]
    else:
        inner = dense.inside(call, grad_out, at)
        if len(at) > 1 and not _is_all(dense, call, grad_out, at, inner):
            at, inner = whole, dense.inside(call, grad_out, whole)
    (n, count), size = inner.shape[:2], inner.shape[2]
    found, signs = factor(inner.reshape(n * count, size, size))
    found = found.unflatten(1, (n, count)).permute(2, 0, 1, 3)  # [B, K, N, S]
    columns = grad_out.new_zeros(count, len(signs), n, total)
    columns.scatter_(3, at[:, None, None, :].expand_as(found), found)
    return columns.flatten(0, 1), signs.unflatten(1, (n, count)).permute(2, 0, 1).flatten(0, 1)


def _is_all(dense: Dense, call: Call, grad_out: Tensor, at: Tensor, inner: Tensor) -> bool:
    """Whether residuals are zero outside of the blocks `inner`: with a random column, both give the same."""
    column = draw((1, call.batch_size, sum(dense.splits)), grad_out, 0)
    product = dense.times(call, grad_out, column)[0][:, at]  # [N, B, S]
    expected = torch.einsum("nbij,nbj->nbi", inner, column[0][:, at])
    scale = product.abs().amax((1, 2), keepdim=True)
    return bool(((product - expected).abs() <= tolerance(product) * scale).all())


def blocks(dense: Tensor) -> Tensor:
    """Indices `[B, S]` of the blocks outside of which a matrix `[D, D]` is zero (`[1, D]`: where sizes differ)."""
    size = len(dense)
    every = torch.arange(size, device=dense.device)
    joined = (dense != 0) | (dense != 0).T | torch.eye(size, dtype=torch.bool, device=dense.device)
    label = every
    while True:  # everyone takes the smallest label around, until all in a block have the same
        least = torch.where(joined, label, size).amin(1)
        least = least[least]
        if torch.equal(least, label):
            break
        label = least
    counts = label.unique(return_counts=True)[1]
    same = len(counts) > 0 and bool((counts == counts[0]).all())
    return label.argsort(stable=True).reshape(len(counts), -1) if same else every[None]


def _dense_residual(
    rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt], shapes: Sequence[torch.Size], n: int
) -> Tensor:
    """The residual of sample `n` as a matrix over the flattened, concatenated `wrts`."""
    one, splits = call.subset([n]), [s.numel() for s in shapes]
    eye = torch.eye(sum(splits), dtype=call.output.dtype, device=call.output.device)
    mats: dict[Wrt, Tensor] = {
        w: part.reshape(-1, 1, *s) if isinstance(w, int) else part.reshape(-1, *s)
        for w, s, part in zip(wrts, shapes, eye.split(splits, 1), strict=True)
    }
    product = rule.residual_mat_prod(one, grad_out[n : n + 1], mats)
    return torch.cat([product[w].reshape(len(eye), -1) for w in wrts], 1)
