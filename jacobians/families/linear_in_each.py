"""Layers that are linear in each of their operands: inputs and parameters that are multiplied with each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.series import Series, Term, add
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.bordered import Bordered, corner


class LinearInEach(Rule):
    """A layer that is linear in each of its inputs and parameters, plus parameters that are only added.

    Its second derivative couples pairs of operands: contracted with the output's gradient `g`,

        (R u)_a = sum_{b != a} J_a(b := u_b)^T g,

    the transposed Jacobian with respect to `a`, evaluated where operand `b` is replaced by `u_b`.
    """

    added: tuple[str, ...] = ("bias",)

    def operands(self, wrts: Sequence[Wrt]) -> tuple[Wrt, ...]:
        """Those of `wrts` that are multiplied with others."""
        return tuple(w for w in wrts if w not in self.added)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL if len(self.operands(wrts)) > 1 else Residual.ZERO

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        operands = self.operands(tuple(mats))
        result: dict[Wrt, Tensor] = {wrt: torch.zeros_like(mat) for wrt, mat in mats.items()}
        for a in operands:
            for b in operands:
                if a != b:
                    pulled = [self.jac_t_mat_prod(replace(call, b, u), grad_out[None], a)[0] for u in mats[b]]
                    result[a] = result[a] + torch.stack(pulled)
        return result

    def signed_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """In closed form for several inputs alone, too."""
        part = corner(self, call, wrts)
        if part:
            return Bordered(self, call, grad_out, wrts, part).signed_columns()
        return super().signed_columns(call, grad_out, wrts)

    def residual_rows(self, call: Call, grad_out: Tensor, wrt: Wrt, wrts: Sequence[Wrt]) -> dict[Wrt, Tensor]:
        """`J_b(wrt := e_j)^T g` for the unit vectors `e_j`, one after the other."""
        shape = call.sample_shape(wrt)
        units = torch.eye(shape.numel(), dtype=call.output.dtype, device=call.output.device).reshape(-1, *shape)
        operands, rows = self.operands(wrts), dict[Wrt, Tensor]()
        for b in wrts:
            own = call.sample_shape(b)
            if b == wrt or b not in operands or wrt not in operands:
                rows[b] = units.new_zeros(()).expand(len(units), call.batch_size, *own)
            else:
                values = (u.expand(call.batch_size, *u.shape) if isinstance(wrt, int) else u for u in units)
                calls = (replace(call, wrt, value) for value in values)
                rows[b] = torch.stack([self.jac_t_mat_prod(c, grad_out[None], b, sum_batch=False)[0] for c in calls])
        return rows

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """By Leibniz: `c_k` is the sum of the layer's values at all coefficients whose orders add up to `k`."""
        first = next(iter(series.values()))
        columns = {i: (call.inputs[i][None], *s.terms) for i, s in series.items()}
        terms: list[Term] = []
        for k in range(1, first.order + 1):
            total: Term = None
            for orders in splits(k, len(series)):
                chosen = {i: columns[i][j] for i, j in zip(series, orders, strict=True)}
                known = {i: c for i, c in chosen.items() if c is not None}
                if len(known) == len(chosen):
                    total = add(total, self.at_columns(call, known, dict(zip(series, orders, strict=True)), first))
            terms.append(total)
        return first.moved(call.output, terms)

    def at_columns(self, call: Call, columns: Mapping[int, Tensor], orders: Mapping[int, int], like: Series) -> Tensor:
        """The layer, without what is added, at columns `[V, N, *in]` of some inputs: `[V, N, *out]`."""
        moving = [i for i, order in orders.items() if order]
        if len(moving) == 1:
            return self.jac_mat_prod(call, columns[moving[0]], moving[0])
        count = max(len(c) for c in columns.values())
        folded = {i: c.expand(count, *c.shape[1:]).flatten(0, 1) for i, c in columns.items()}
        shared = [x.expand(count, *x.shape).flatten(0, 1) for x in call.inputs]
        output = call.output.expand(count, *call.output.shape).flatten(0, 1)
        wide = Call(call.options, [folded.get(i, x) for i, x in enumerate(shared)], call.params, output)
        found = self.jac_mat_prod(wide, folded[moving[0]][None], moving[0])[0].unflatten(0, (count, -1))
        top = like.collapse is not None and sum(orders.values()) == like.order
        return like.collapse.of(found) if top and like.collapse is not None else found


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many, in order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in splits(total - first, parts - 1))


def replace(call: Call, wrt: Wrt, value: Tensor) -> Call:
    """The same call with another value for one operand (what was remembered is dropped)."""
    inputs = [value if wrt == k else x for k, x in enumerate(call.inputs)]
    params = {name: value if wrt == name else p for name, p in call.params.items()}
    return Call(call.options, inputs, params, call.output)
