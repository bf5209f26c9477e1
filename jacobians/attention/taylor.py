"""Multi-head attention along curves: linear projections around the series of the heads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bpk.jacobians.attention.attention import merge_heads, split_heads
from bpk.jacobians.attention.own_residual import ProjectionResidual
from bpk.jacobians.attention.parts import projection_tangent
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import linear
from bpk.jacobians.core.series import Series, Term
from bpk.jacobians.second_order.taylor import by_nesting


class AttentionTaylor(ProjectionResidual):
    """The Taylor product of attention with projections."""

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
