"""The second derivative of a recurrent layer, contracted with the gradient of its results.

It is the derivative of the backward recurrence along a tangent. Two things in it depend on the point: the slopes of
the cells (their second derivative is that of `Cell.output`, unit by unit), and the maps `W u`, bilinear in a weight
and what it is multiplied with. Hence: one forward recurrence for the tangents, then the backward recurrence again, with

    added to dq_t       (d2 output / dq2)[dm_t, dc_t] q'_t
    added to dh_(t-1)   W_hh'^T db_t,   to dx_t   W_ih'^T da_t,   to dm_t   W_hr'^T dh_t
    added to dW         da_t x'_t^T, db_t h'_(t-1)^T, dh_t m'_t^T

where a prime marks tangents, and `d` gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.func import vmap

from bpk.jacobians.core.products import add_up
from bpk.jacobians.families import sequences
from bpk.jacobians.recurrent.back import Adjoint, gradients_of_states, pull
from bpk.jacobians.recurrent.forth import Tangent
from bpk.jacobians.recurrent.scan import Trace
from bpk.jacobians.recurrent.stack import Seeds, Stack


@dataclass
class ResidualProducts:
    """Products with the residual: for the input `[T, V, N, I]`, states `[V, N, *]` by scan, parameters `[V, *p]`."""

    x: Tensor
    states: dict[int, tuple[Tensor, Tensor | None]]
    params: dict[str, Tensor]

    def input(self) -> Tensor:
        """For the input `[T, V, N, I]`."""
        return self.x

    def state(self, index: int) -> Tensor:
        """For the initial hidden (1) or cell (2) state `[V, N, scans, *]`."""
        found = [self.states[number][index - 1] for number in sorted(self.states)]
        return torch.stack([x for x in found if x is not None], 2)


@dataclass
class Point:
    """A scan with the gradients that a call has there: of its pre-activations, and `[T, N, H]` of both states."""

    trace: Trace
    adjoint: Adjoint
    dm: Tensor
    dc: Tensor | None

    def second(self, q: Tensor) -> Tensor:
        """The second derivative of the cells times tangents of local variables `[T, V, N, K, H]`."""
        cell, at = self.trace.cell, self.trace.q
        return vmap(lambda q: cell.second(at, self.dm, self.dc, q), 1, 1)(q)


def points(stack: Stack, grad: Seeds) -> list[list[Point]]:
    """The scans of all layers, with the gradients of a call whose results have these, `[1, ...]`."""
    base, dy, found = stack.pull(grad), grad.y, list[list[Point]]()
    for k in reversed(range(len(stack.traces))):
        row = []
        for (trace, seeds), adjoint in zip(stack.seeds_of(k, dy, grad), base.adjoints[k], strict=True):
            dm, dc = gradients_of_states(trace, adjoint, *seeds)
            row.append(Point(trace, adjoint, dm[:, 0], None if dc is None else dc[:, 0]))
        found.insert(0, row)
        dy = stack.input_gradient(k, base.adjoints[k]) if k else None
    return found


def residual_mat_prod(
    stack: Stack,
    grad: Seeds,
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    params: Mapping[str, Tensor],
    lead: int,
) -> ResidualProducts:
    """Multiply with the residual, jointly over the input, both initial states and some parameters."""
    base, (_, tangents) = points(stack, grad), stack.push(*inputs, params, lead)
    found = ResidualProducts(torch.empty(0), {}, {})
    dy = Seeds()
    for k in reversed(range(len(stack.traces))):
        of_input = []
        for point, (trace, (part, _, _)), tangent in zip(
            base[k], stack.seeds_of(k, dy.y, dy), tangents[k], strict=True
        ):
            own, adjoint = trace.scan.by_role(params), point.adjoint
            second, dh0 = scan_back(point, tangent, own, part)
            found.states[trace.scan.number] = dh0, second.dc0
            for role, product in of_params(trace, adjoint, second, tangent, own).items():
                found.params[role + trace.scan.suffix] = product
            dx = stack.cell.of_input(second.dq) @ trace.params["weight_ih"]
            if "weight_ih" in own:
                dx = dx + sent(stack.cell.of_input(adjoint.dq), own["weight_ih"])
            of_input.append(trace.scan.turned(dx))
        found.x = stack.entering(k, add_up(of_input))
        dy = Seeds(found.x)
    return found


def residual_squares(stack: Stack, at: Sequence[Sequence[Point]], params: Mapping[str, Tensor], lead: int) -> Tensor:
    """`v^T R v` `[V, N]` for every sample's residual `R` and some tangents `v` of parameters.

    What is bilinear in a weight and its values counts twice: this needs no recurrence back in time.
    """
    found = []
    for point, tangent in zip(chain(*at), chain(*stack.push(None, None, None, params, lead)[1]), strict=True):
        found.append((point.second(tangent.q) * tangent.q).sum((0, 3, 4)))
        own, moved = point.trace.scan.by_role(params), tangent.by_role()
        for role in own.keys() & moved.keys():
            given = point.adjoint.of(point.trace, role)[:, 0]
            found.append(2 * torch.einsum("tno,voi,tvni->vn", given, own[role], moved[role]))
    return add_up(found)


def scan_back(point: Point, tangent: Tangent, own: Mapping[str, Tensor], dy: Tensor | None) -> tuple[Adjoint, Tensor]:
    """The derivative of a scan's backward recurrence, and that of the gradient of its initial hidden state."""
    trace, adjoint, local = point.trace, point.adjoint, point.second(tangent.q)
    start: Tensor | None = None
    if "weight_hh" in own:
        back = sent(trace.cell.of_hidden(adjoint.dq), own["weight_hh"])
        start, later = back[0], torch.cat([back[1:], torch.zeros_like(back[:1])])
        dy = later if dy is None else dy + later
    dy = local.new_zeros(*local.shape[:3], trace.before.shape[-1]) if dy is None else dy
    middle = sent(adjoint.of(trace, "weight_hr"), own["weight_hr"]) if "weight_hr" in own else None
    second = pull(trace, dy, None, None, local=local, middle=middle)
    return second, second.dh0 if start is None else second.dh0 + start


def of_params(
    trace: Trace, adjoint: Adjoint, second: Adjoint, tangent: Tangent, own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Products for the parameters of a scan, `[V, *p]`."""
    found = {}
    moved = tangent.by_role()
    for role in own:
        columns, values = second.of(trace, role), trace.value(role)
        if values is None:
            found[role] = columns.sum((0, 2))
            continue
        found[role] = sequences.summed(columns.movedim(0, 2), values.transpose(0, 1))
        if role in moved:
            found[role] = found[role] + torch.einsum("tno,tvni->voi", adjoint.of(trace, role)[:, 0], moved[role])
    return found


def sent(columns: Tensor, weights: Tensor) -> Tensor:
    """The only column `[T, 1, N, O]`, sent back through several weights `[V, O, I]`: `[T, V, N, I]`."""
    return torch.einsum("tno,voi->tvni", columns[:, 0], weights)
