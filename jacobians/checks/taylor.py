"""What `check_rule` asserts of the Taylor product: coefficients along curves against nested autograd."""

from __future__ import annotations

from math import factorial

import torch
from torch import Tensor

from bpk.jacobians.checks.case import Case
from bpk.jacobians.checks.reference import Reference
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.series import Collapse, Series
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.fused import Composed

ORDER = 3
"""Up to which coefficient (`ORDER - 1` where torch does not differentiate the layer so often)."""


def taylor(case: Case) -> None:
    """Along two curves through all inputs together, along those of the first alone, and summed over the curves."""
    inputs = [wrt for wrt in case.reference.wrts if isinstance(wrt, int)]
    for moving in dict.fromkeys((tuple(inputs), tuple(inputs[:1]))):
        curves = {i: [case.tangent(2, i) for _ in range(ORDER)] for i in moving}
        if moving:
            along_curves(case, curves)


def along_curves(case: Case, curves: dict[int, list[Tensor]]) -> None:
    """`c_1 ... c_K` of the output, and the last one summed over curves with weights.

    Outputs are contracted with random cotangents `u`, so that reverse mode can differentiate `<u, out(t)>` in `t`.
    """
    cotangents = case.cotangent(3).double()
    expected = coefficients(case.reference, curves, cotangents)
    if not expected:
        case.skip("torch does not differentiate the layer along a curve")
        return
    order, weights = len(expected), case.random(2)
    series = {i: Series(case.call.inputs[i], tuple(cs[:order])) for i, cs in curves.items()}
    found = case.run("taylor", along, case.rule, case.call, series)
    if found is None:
        return
    for k, (got, target) in enumerate(zip(found, expected, strict=True), start=1):
        case.same(f"taylor (coefficient {k})", got @ as_rows(cotangents).T, target, None, ("curve", "cotangent"))
    collapse = Collapse(weights)
    summed = {
        i: Series(s.value, (*s.terms[:-1], collapse.of(curves[i][order - 1])), collapse) for i, s in series.items()
    }
    again = case.run("taylor", along, case.rule, case.call, summed)
    if again is not None:
        case.same("taylor (summed)", again[-1], collapse.of(found[-1]), against="each curve by itself")


def along(rule: Rule, call: Call, series: dict[int, Series]) -> tuple[Tensor, ...]:
    """The coefficients, flattened, with zeros written out."""
    found = rule.taylor(call, series)
    like = next(iter(series.values()))
    counts = [0 if d is None else len(d) for d in like.terms]
    pairs = zip(found.terms, counts, strict=True)
    full = [call.output.new_zeros(count, *call.output.shape) if c is None else c for c, count in pairs]
    return tuple(as_rows(c) for c in full)


def coefficients(reference: Reference, curves: dict[int, list[Tensor]], cotangents: Tensor) -> list[Tensor]:
    """`<u, c_k>` `[V, U]` for `k = 1, 2, ...`, by differentiating the layer again and again along each curve."""
    found: list[list[Tensor]] = []
    for v in range(2):
        each = of_curve(reference, {i: [c[v] for c in cs] for i, cs in curves.items()}, cotangents)
        found.append([torch.stack(parts) for parts in zip(*each, strict=False)])
    return [torch.stack(parts) for parts in zip(*found, strict=False)]


def of_curve(reference: Reference, curve: dict[int, list[Tensor]], cotangents: Tensor) -> list[list[Tensor]]:
    """One curve, and each of the cotangents."""
    with torch.enable_grad():
        t = torch.zeros((), dtype=reference.output.dtype, requires_grad=True)
        inputs = [x.detach() for x in reference.inputs]
        for i, cs in curve.items():
            for k, c in enumerate(cs, start=1):
                inputs[i] = inputs[i] + c * t**k
        with Composed():  # torch's third derivatives of its fused normalisations are wrong
            output = reference.at(inputs)
        return [derivatives(reference, (output * u).sum(), t) for u in cotangents]


def derivatives(reference: Reference, value: Tensor, t: Tensor) -> list[Tensor]:
    """Those of a number in `t`, divided by factorials, as many as torch has."""
    found: list[Tensor] = []
    for k in range(1, ORDER + 1):
        try:
            value = reference.grads(value, (t,), create_graph=True)[0]
        except (RuntimeError, NotImplementedError):  # no double backward
            return found
        found.append(value.detach() / factorial(k))
    return found
