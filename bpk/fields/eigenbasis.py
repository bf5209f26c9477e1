"""The eigenbases of a parameter's Kronecker factors, and second moments in them (EKFAC)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE
from bpk.fields.statistics import PLAIN, Approximation, Uses
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import is_finite, wide
from bpk.jacobians.core.room import WHOLE
from bpk.utils.ekfac import Eigenbasis
from bpk.utils.sparse_factors import diagonal, sparse_diagonal

Decomposed = tuple[Tensor, Tensor | None]
"""Eigenvalues and eigenvectors (`None`: the axes)."""

Orders = dict[Tensor, Tensor | None]
"""By parameter `[*p]`: the entries `[P]` in the order of its factors' product (`None`: as they are).

Embeddings and transposed convolutions have the axis of `A` in front.
"""


def eigenbasis(uses: Uses, approximation: Approximation = PLAIN) -> Eigenbasis:
    """The bases of the factors in their order, and `sum_vn (U_G^T R_vn U_A)^2` over columns and samples.

    Where the only factor is the block itself, moments are its eigenvalues. Bases count as constants of derivatives.
    """
    factors = uses.factors(approximation)
    outputs = len(factors) - 1 if uses.input_first else 0
    found = [
        (decomposed_once if number == outputs else decomposed)(factor.detach(), uses)
        for number, factor in enumerate(factors)
    ]
    bases = [identity(factor) if basis is None else basis for factor, (_, basis) in zip(factors, found, strict=True)]
    if len(factors) == 1:
        return Eigenbasis(bases, found[0][0].clamp(min=0).to(uses.param.dtype))
    return Eigenbasis(bases, moments_in(uses, [basis for _, basis in found], approximation))


def moments_in(uses: Uses, bases: Sequence[Tensor | None], approximation: Approximation = PLAIN) -> Tensor:
    """The diagonal `[G, A]` (or `[G]`) of the GGN's block in any bases (`None`: axes), in the order of the factors."""
    factors, use = uses.factors(approximation), uses.uses[0]
    bases = [None if basis is None or basis.layout is not torch.strided else basis for basis in bases]
    if len(factors) == 1:
        (factor,), (basis,) = factors, bases
        if basis is not None:
            found = torch.sum((factor @ basis) * basis, 0)
        else:
            found = factor.diagonal() if factor.layout is torch.strided else diagonal(factor)
        return found.clamp(min=0).to(uses.param.dtype)
    turned = use.rule.input_first(use.name)
    left, right = bases[::-1] if turned else bases
    moments = projected(uses, len(factors[1 if turned else 0]), left, right).to(uses.param.dtype)
    return moments.T if turned else moments


def note_order(orders: Orders, uses: Uses, factors: Sequence[Tensor]) -> None:
    """Note, once, which entry of the flat parameter each row of the factors' product belongs to."""
    if len(factors) == 1 or uses.parameter in orders:
        return
    use, turned = uses.uses[0], uses.input_first
    in_order = torch.arange(uses.param.numel(), device=uses.param.device)
    numbers, outputs = in_order.view(1, 1, *uses.param.shape), len(factors[1 if turned else 0])
    matrix = use.rule.kron_matrix(use.call, numbers, use.name, outputs)[0, 0]
    order = (matrix.T if turned else matrix).flatten()
    orders[uses.parameter] = None if torch.equal(order, in_order) else order


def decomposed_once(factor: Tensor, uses: Uses) -> Decomposed:
    """`decomposed`; a weight and its bias have the same `G`, and the second one gets a copy of what the first has."""
    call = uses.uses[-1].call
    if len(call.params) < 2 or factor.layout is not torch.strided:
        return decomposed(factor, uses)
    known: list[tuple[Tensor, Decomposed]] = call.memo("decomposed", list)
    for number, (other, (values, basis)) in enumerate(known):
        if (other.shape, other.dtype) == (factor.shape, factor.dtype) and torch.equal(other, factor):
            del known[number]
            return values, None if basis is None else basis.clone()
    known.append((factor, decomposed(factor, uses)))
    return known[-1][1]


def decomposed(factor: Tensor, uses: Uses) -> Decomposed:
    """Eigenvalues and eigenvectors; these are the axes (`None`) of a diagonal factor, such as that of an embedding."""
    if factor.layout is not torch.strided:
        row, column = factor.coalesce().indices()
        if not torch.equal(row, column):
            raise UnsupportedLayer(
                f"EKFAC has no eigenbasis for a parameter {list(uses.param.shape)}.",
                f"its factor [{len(factor)}, {len(factor)}] is sparse, but not diagonal.",
                "freeze the parameter (requires_grad=False), or use KFAC or DiagGGNMC for it.",
            )
        return diagonal(factor), None
    if not is_finite(factor):  # what was not finite stays so, and where it was
        return torch.full_like(factor[0], torch.nan), torch.full_like(factor, torch.nan)
    entries = factor.diagonal()
    if int(factor.count_nonzero()) == int(entries.count_nonzero()):
        return entries, None
    values, vectors = eigh(wide(factor))
    return values, vectors.to(factor.dtype).contiguous()


def identity(factor: Tensor) -> Tensor:
    """The basis of a diagonal factor; sparse, if it is large."""
    ones = torch.ones(len(factor), dtype=factor.dtype, device=factor.device)
    return sparse_diagonal(ones) if len(factor) > WHOLE else ones.diag()


def projected(uses: Uses, outputs: int, left: Tensor | None, right: Tensor | None) -> Tensor:
    """`sum_vn (U_G^T R_vn U_A)^2` `[G, A]`: by the rule, or from the rows of a few samples at a time."""
    use = uses.uses[0]
    if uses.simple:
        found = use.rule.projected_squares(use.call, list(use.arrived.blocks.values()), use.name, left, right)
        if found is not None:
            return found
    step = max(1, PIECE // max(1, uses.lead[0] * uses.param.numel()))
    total: Tensor | None = None
    for start in range(0, uses.count, step):
        rows = uses.of_samples(range(start, min(start + step, uses.count))).all_rows()
        matrices = wide(use.rule.kron_matrix(use.call, rows, use.name, outputs))
        matrices = matrices if left is None else torch.einsum("vnga,gh->vnha", matrices, left.to(matrices.dtype))
        matrices = matrices if right is None else matrices @ right.to(matrices.dtype)
        found = matrices.square().sum((0, 1))
        total = found if total is None else total + found
    assert total is not None
    return total
