"""Kronecker factors of each sample for itself, of all samples at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.fields.arrived import ClosedForm, Use
from bpk.fields.statistics import Uses
from bpk.jacobians.core.numeric import chunks, products, wide
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.room import is_too_large_for_a_block


def factors_by_sample(uses: Uses) -> list[Tensor] | None:
    """`[G, A]` with `G` `[N, G, G]` and `A` `[N, A, A]`, or `[G]`; `None` where it takes one sample after the other.

    Where one call has rows as sums of outer products, what its weight multiplies is known: `A_n = sum_t a_nt a_nt^T`,
    as in the rule's own factor (`check_rule` compares them).
    """
    use = uses.uses[0]
    if not uses.simple or isinstance(use.arrived, ClosedForm) or torch.is_grad_enabled():
        return None
    mats = list(use.arrived.blocks.values())
    one = use.rule.kron_input(use.call.subset([0]), use.name)
    known = one is not None and use.rule.factors_from_outer
    parts = use.rule.outer(use.call, mats[0][:1], use.name) if known else ()
    if is_too_large_for_a_block(uses.param) if one is None else not parts or one.layout is not torch.strided:
        return None
    uses.require_room_beside(one)
    outputs = output_factors(use, mats[0])
    for mat in mats[1:]:
        outputs.add_(output_factors(use, mat))
    factors = [outputs.to(mats[0].dtype), *([input_factors(parts, uses.param)] if parts else [])]
    return factors[::-1] if uses.input_first else factors


def output_factors(use: Use, mat: Tensor) -> Tensor:
    """`sum_v g_vn g_vn^T` `[N, G, G]` of a block of columns."""
    rows = wide(use.rule.kron_rows(use.call, mat, use.name)).transpose(0, 1).flatten(1, -2).mT
    return products(rows, rows)


def input_factors(parts: Sequence[Outer], like: Tensor) -> Tensor:
    """`sum_t a_nt a_nt^T` `[N, I, I]`, the mean over groups, and over weights that are stacked."""
    _, n, groups, _, width, t = parts[0].shape
    found = like.new_empty(n, width, width)
    for some in chunks(n, width * (width + groups * t), like.device):
        goal = found[some]
        for number, part in enumerate(parts):
            a = wide(part.patches(some)).transpose(1, 2).flatten(2)
            if not number and a.dtype is goal.dtype:
                torch.mul(a, a.mT, out=goal) if a.shape[2] == 1 else products(a, a, out=goal)
            else:
                product = products(a, a).to(goal.dtype)
                goal.copy_(product) if not number else goal.add_(product)
        if groups * len(parts) > 1:
            goal.div_(groups * len(parts))
    return found
