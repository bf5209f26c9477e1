"""Derivatives of attention: the diagonal of the second one in a projection alone, and all of them along curves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from bpk.jacobians.attention.attention import Heads, Tangent, merge_heads, split_heads
from bpk.jacobians.attention.parts import PROJECTIONS, projection_tangent
from bpk.jacobians.attention.weights import LinearInside
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import linear
from bpk.jacobians.core.series import Series, Term
from bpk.jacobians.second_order.taylor import by_nesting

AT_ONCE = 1 << 20
"""How many numbers products with unit vectors hold at a time, about."""


class AttentionDerivatives(LinearInside):
    """Linear projections around the series of the heads, and second derivatives of single projections.

    With the second derivative `R` in queries (or keys) `W x + b`, that in `W` has the diagonal

    sum_ts R[(t, o), (s, o)] x_ti x_si,

    and that in `b` the same without `x`. A query is coupled to itself only; in values, the layer is linear.
    """

    @abstractmethod
    def at(self, call: Call) -> Heads:
        """The point."""

    @abstractmethod
    def columns_at_heads(self, call: Call, mat: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """From columns at the results to those at the heads' output and weights."""

    def residual_squares(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        if param not in ("in_proj_weight", "in_proj_bias", *PROJECTIONS):
            return super().residual_squares(call, grad_out, param)
        roles = [PROJECTIONS.index(param)] if param in PROJECTIONS else range(3)
        found = [self.squares_of(call, grad_out, role, not param.endswith("bias")) for role in roles]
        return torch.cat(found, 1)

    def squares_of(self, call: Call, grad_out: Tensor, role: int, weight: bool) -> Tensor:
        """The diagonal `[N, D, E]` in the weight, or `[N, D]` in the bias, of one projection."""
        c, cp = (None if m is None else m[0] for m in self.columns_at_heads(call, grad_out[None]))
        at, x = self.at(call), call.inputs[role]
        if role == 0:
            own = merge_heads(of_queries(at, c, cp))  # [N, T, D]
            return own.mT @ x.square() if weight else own.sum(1)
        if role == 2:
            width = at.v.shape[1] * at.v.shape[3]
            return x.new_zeros(len(x), width, *x.shape[2:]) if weight else x.new_zeros(len(x), width)
        s = x.shape[1]
        pairs = of_keys(at, c, cp)[:, :, :, :s, :s].flatten(1, 2)  # [N, D, S, S]
        if not weight:
            return pairs.sum((2, 3))
        return torch.einsum("ndsi,nsi->ndi", torch.matmul(pairs, x[:, None]), x)

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        if any(i > 2 for i in series):  # a mask that moves
            return by_nesting(self, call, series)

        def at_heads(mat: Tensor, role: int) -> Tensor:
            moved = projection_tangent(call, {role: mat}, role)
            assert moved is not None
            return split_heads(moved, call.options.heads)

        z, p = self.at(call).along(series, at_heads)
        out = z.linear(z.value, lambda c: linear(merge_heads(c), call.params["out_proj.weight"]))
        shown = p.linear(p.value, lambda c: c.mean(2)) if call.options.averaged else p
        found = [(out, shown)[number].terms for number in call.used]
        return z.moved(call.output, [self.together(call, parts) for parts in zip(*found, strict=True)])

    def together(self, call: Call, parts: tuple[Term, ...]) -> Term:
        """One coefficient of the results that matter."""
        known = next((c for c in parts if c is not None), None)
        if known is None:
            return None
        shapes = zip(call.used.items(), parts, strict=True)
        lead = known.shape[:2]
        return self.merge(call, {n: known.new_zeros(*lead, *s) if c is None else c for (n, s), c in shapes})


def of_queries(at: Heads, c: Tensor | None, cp: Tensor | None) -> Tensor:
    """`R[(t, j), (t, j)]` `[N, H, T, d]`: one product for each feature, at all positions and heads at once."""
    found = torch.empty_like(at.q)
    for j, unit in enumerate(torch.eye(at.q.shape[-1], dtype=at.q.dtype, device=at.q.device)):
        found[..., j] = at.pull_second(c, cp, Tangent(q=unit.expand(1, *at.q.shape)))[0][0, ..., j]
    return found


def of_keys(at: Heads, c: Tensor | None, cp: Tensor | None) -> Tensor:
    """`R[(t, j), (s, j)]` `[N, H, d, S, S]`: one product for each feature and position, at all heads at once."""
    s, d = at.k.shape[-2:]
    units = torch.eye(s * d, dtype=at.k.dtype, device=at.k.device).reshape(-1, 1, 1, s, d)
    rows = []
    for number, part in enumerate(units.split(step := max(1, AT_ONCE // max(1, at.p.numel())))):
        found = at.pull_second(c, cp, Tangent(k=part.expand(-1, *at.k.shape)))[1]
        feature = torch.arange(number * step, number * step + len(part), device=found.device) % d
        rows.append(found[torch.arange(len(part), device=found.device), ..., feature])  # [V, N, H, S]
    return torch.cat(rows).unflatten(0, (s, d)).permute(2, 3, 1, 0, 4)
