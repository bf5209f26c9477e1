"""Symmetric matrices as signed columns, `R = sum_k s_k u_k u_k^T`: second derivatives that nobody has declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.gemm import wide
from bpk.jacobians.core.rule import Rule
from bpk.jacobians.families.autodiff_graph import is_differentiated
from bpk.jacobians.second_order.block_diagonal import connected, dense_blocks
from bpk.jacobians.second_order.bordered import Bordered, corner, flattened, rows_by_sample, unflattened
from bpk.jacobians.second_order.probing import draw, marks, same, tolerance

BALANCE = 4
"""How many times rows are scaled by the root of their largest entry; a ratio is then its 16th root."""


def factor(dense: Tensor, balanced: bool = False) -> tuple[Tensor, Tensor]:
    """Eigendecompose symmetric matrices `[N, D, D]` into columns `[K, N, D]` and signs `[K, N]`.

    Columns that are zero up to rounding are left out, so that `K` is the largest rank. A matrix with NaN or infinite
    entries gives NaN columns, and leaves the other samples alone. Rounding is that of the largest eigenvalue. Columns
    that are `balanced` are no eigenvectors, but those of the matrix whose rows have been scaled to about the same size
    (Ruiz, 2001), scaled back: rounding is that of each row then.
    """
    symmetric = wide((dense + dense.transpose(1, 2)) / 2)
    scale = None
    if balanced and not is_differentiated() and symmetric.numel():
        scale = symmetric.new_ones(symmetric.shape[:2])
        for _ in range(BALANCE):
            step = torch.ldexp(torch.ones_like(scale), torch.frexp(symmetric.abs().amax(2))[1] // 2)  # a power of two
            symmetric, scale = symmetric / (step[:, :, None] * step[:, None]), scale * step
    healthy = torch.isfinite(symmetric).flatten(1).all(1)
    values, basis = eigh(torch.where(healthy[:, None, None], symmetric, torch.zeros_like(symmetric)))
    if not is_differentiated() and values.numel():
        size, order = values.abs().sort(1, descending=True)
        rounding = 4 * torch.finfo(values.dtype).eps * size.shape[1]
        rank = max(1, int((size > rounding * size[:, :1]).sum(1).max()))
        order = order[:, :rank]
        values, basis = values.gather(1, order), basis.gather(2, order[:, None].expand(-1, basis.shape[1], -1))
    columns = (basis * values.abs().sqrt()[:, None, :]).permute(2, 0, 1)
    columns = columns if scale is None else columns * scale
    columns = torch.where(healthy[None, :, None], columns, torch.full_like(columns, torch.nan))
    return columns.to(dense.dtype), values.sign().T.to(dense.dtype)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`, in double precision where it fails: in single precision it sometimes does not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        values, vectors = (part.to(matrices.dtype) for part in torch.linalg.eigh(matrices.double()))
    return values, vectors


def residual_columns(
    rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt], balanced: bool = False
) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Eigendecompose the residual of every sample, jointly over `wrts` (`balanced`: see `factor`).

    Inputs may fall into blocks (layers that act on one axis), which are decomposed one by one. A layer that is linear
    in its parameters, or in its inputs, leaves a corner of the residual zero, which need not be computed.
    """
    shapes = {w: call.sample_shape(w) for w in wrts}
    if all(isinstance(w, int) for w in wrts) and not is_differentiated():
        vectors, signs = _columns_of_blocks(Inputs(rule, shapes), call, grad_out, balanced)
    elif part := corner(rule, call, wrts):
        bordered = Bordered(rule, call, grad_out, wrts, part)
        small, basis = bordered.dense()
        vectors, signs = factor(small, balanced)
        return bordered.parts(vectors, basis), signs
    else:
        vectors, signs = factor(flattened(rows_by_sample(rule, call, grad_out, wrts, wrts)).transpose(0, 1), balanced)
    return unflattened(vectors, shapes), signs


class Inputs:
    """Residuals over the flattened, concatenated inputs of a layer, with these shapes of one sample."""

    def __init__(self, rule: Rule, shapes: Mapping[Wrt, torch.Size]) -> None:
        self.rule, self.shapes = rule, shapes
        self.total = sum(s.numel() for s in shapes.values())

    def times(self, call: Call, grad_out: Tensor, columns: Tensor) -> Tensor:
        """`[V, N, D] -> [V, N, D]`."""
        product = self.rule.residual_mat_prod(call, grad_out, unflattened(columns, self.shapes))
        return flattened({w: product[w] for w in self.shapes})

    def inside(self, call: Call, grad_out: Tensor, at: Tensor) -> Tensor:
        """What lies in the blocks of indices `at` `[B, S]`: `[N, B, S, S]`."""
        width = max(self.total, call.output[:1].numel())
        return dense_blocks(partial(self.times, call, grad_out), at, grad_out, width)


def _columns_of_blocks(inputs: Inputs, call: Call, grad_out: Tensor, balanced: bool) -> tuple[Tensor, Tensor]:
    """Columns `[K, N, D]` and signs. The first sample shows the blocks; a random column tells if all have the same."""
    whole = torch.arange(inputs.total, device=grad_out.device)[None]
    first = inputs.inside(call.subset([0]), grad_out[:1], whole)
    at = connected(first[0, 0])
    if call.batch_size == 1:
        inner = first[:, 0][:, at[:, :, None], at[:, None, :]]
    else:
        inner = inputs.inside(call, grad_out, at)
        if len(at) > 1 and not _is_all(inputs, call, grad_out, at):
            at, inner = whole, inputs.inside(call, grad_out, whole)
    (n, count), size = inner.shape[:2], inner.shape[2]
    found, signs = factor(inner.reshape(n * count, size, size), balanced)
    found = found.unflatten(1, (n, count)).permute(2, 0, 1, 3)  # [B, K, N, S]
    columns = grad_out.new_zeros(count, len(signs), n, inputs.total)
    columns.scatter_(3, at[:, None, None, :].expand_as(found), found)
    return columns.flatten(0, 1), signs.unflatten(1, (n, count)).permute(2, 0, 1).flatten(0, 1)


def _is_all(inputs: Inputs, call: Call, grad_out: Tensor, at: Tensor) -> bool:
    """Whether residuals of all samples are zero outside of the blocks: a factor for each block commutes with them."""
    block = torch.empty_like(at.flatten()).scatter_(0, at.flatten(), torch.arange(at.numel(), device=at.device))
    factors = marks(block // at.shape[1], len(at), grad_out.dtype)
    column = draw((1, call.batch_size, inputs.total), grad_out, 0)
    plain = inputs.times(call, grad_out, column)
    return all(same(inputs.times(call, grad_out, f * column), f * plain, tolerance(column)) for f in factors)
