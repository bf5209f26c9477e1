"""The Taylor product of a layer: from power series of its inputs to the one of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.products import Differentiable, Residual
from bpk.jacobians.core.series import Series, add
from bpk.jacobians.second_order.nested import nested


class TaylorProduct:
    """What every rule has: `taylor`, by linearity where the second derivative is declared zero, else by nesting."""

    def taylor(self: Differentiable, call: Call, series: Mapping[int, Series]) -> Series:
        """The output's coefficients `[V, N, *out]` from those of some inputs, `[V, N, *in]` each (see `Series`)."""
        if self.residual(call, tuple(series)) is Residual.ZERO:
            return linear(self, call, series)
        return by_nesting(self, call, series)


def linear(rule: Differentiable, call: Call, series: Mapping[int, Series]) -> Series:
    """`c_k = sum_i J_i a_ik`, for a layer that is linear in all these inputs together."""
    first, *others = (s.linear(call.output, partial(rule.jac_mat_prod, call, wrt=i)) for i, s in series.items())
    terms = list(first.terms)
    for other in others:
        terms = [add(a, b) for a, b in zip(terms, other.terms, strict=True)]
    return first.moved(call.output, terms)


def by_nesting(rule: Differentiable, call: Call, series: Mapping[int, Series]) -> Series:
    """By derivatives along the curves."""

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(series, values, strict=True))
        return (rule.evaluate(call, [given.get(k, x) for k, x in enumerate(call.inputs)], call.params),)

    first = next(iter(series.values()))
    given = [Series(call.inputs[i], s.terms, s.collapse) for i, s in series.items()]
    return replace(first.moved(call.output, nested(function, given)[0]), nested=True)
