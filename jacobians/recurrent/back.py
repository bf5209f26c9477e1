"""Back in time: what came of columns at the results of a scan, by one recurrence for all that asks.

Columns are time first: `[T, V, N, *]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import linear
from bpk.jacobians.recurrent.scan import Trace


@dataclass
class Adjoint:
    """What one backward recurrence finds out for some columns.

    `dq` `[T, V, N, K, H]` belongs to the local variables, `dh` `[T, V, N, P]` to the hidden states (where they are
    projected), `dh0` and `dc0` `[V, N, *]` to the initial states.
    """

    dq: Tensor
    dh: Tensor | None
    dh0: Tensor
    dc0: Tensor | None

    def of(self, trace: Trace, role: str) -> Tensor:
        """The gradient `[T, V, N, O]` of what a weight makes or a bias is added to."""
        if role == "weight_hr":
            assert self.dh is not None
            return self.dh
        return trace.cell.of_input(self.dq) if role.endswith("_ih") else trace.cell.of_hidden(self.dq)


def pull(
    trace: Trace,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    local: Tensor | None = None,
    middle: Tensor | None = None,
) -> Adjoint:
    """From the gradients of the output `[T, V, N, P]` and of the last states `[V, N, *]`.

    `local` `[T, V, N, K, H]` is added to the gradients of the local variables, `middle` `[T, V, N, H]` to those of the
    hidden states before the projection. If `dy` has fewer steps, the rest of the sequence is left out.
    """
    like = next(x for x in (dh, dc, None if dy is None else dy[0]) if x is not None)
    if dh is None:
        dh = like.new_zeros(*like.shape[:2], trace.before.shape[-1])
    dh, dc = dh[:, :, None], None if dc is None else dc[:, :, None]  # as one local variable
    given = None if dy is None else dy[:, :, :, None].unbind()
    if torch.is_grad_enabled() or local is not None or middle is not None:
        return _pull(trace, given, dh, dc, local, middle)
    return _pull_into_buffers(trace, given, dh, dc)


def _pull(
    trace: Trace,
    dy: Sequence[Tensor] | None,
    dh: Tensor,
    dc: Tensor | None,
    local: Tensor | None,
    middle: Tensor | None,
) -> Adjoint:
    """As an ordinary differentiable expression."""
    cell, slopes = trace.cell, trace.slopes
    found, states = [], []
    for t in reversed(range(len(trace.hidden) if dy is None else len(dy))):
        dh = dh if dy is None else dh + dy[t]
        states.append(dh)
        dm = dh @ trace.params["weight_hr"] if trace.projects else dh
        dm = dm if middle is None else dm + middle[t, :, :, None]
        dq = cell.pull(slopes.slope[t], None if slopes.via is None else slopes.via[t], dm, dc)
        dq = dq if local is None else dq + local[t]
        found.append(dq)
        dh = (cell.of_hidden(dq) @ trace.params["weight_hh"]).view(dh.shape)
        carry = cell.of_carry(dq)
        if carry is not None:
            dc, dh = (carry[..., None, :], dh) if cell.memory else (None, dh + carry[..., None, :])
    return _adjoint(trace, torch.stack(found[::-1]), states, dh, dc)


def _pull_into_buffers(trace: Trace, dy: Sequence[Tensor] | None, dh: Tensor, dc: Tensor | None) -> Adjoint:
    """Without a graph; all views are made beforehand, so that a step is four or five operations."""
    cell, slopes, back = trace.cell, trace.slopes, trace.params["weight_hh"].T
    steps = len(trace.hidden) if dy is None else len(dy)
    dq = dh.new_empty(steps, *dh.shape[:2], *slopes.slope.shape[2:])
    slope = list(zip(*[part.unbind() for part in slopes.slope.split(cell.parts, -2)], strict=True))
    into = list(zip(*[part.unbind() for part in dq.split(cell.parts, -2)], strict=True))
    via = None if slopes.via is None else slopes.via.unbind()
    carry = None if cell.carried is None else dq.narrow(-2, cell.carried, 1).unbind()
    rows = cell.of_hidden(dq).flatten(1, 2).unbind()
    states = []
    for t in reversed(range(steps)):
        if dy is not None:
            dh = dh + dy[t]
        if trace.projects:
            states.append(dh)
        dm = dh @ trace.params["weight_hr"] if trace.projects else dh
        cell.pull_into(slope[t], None if via is None else via[t], dm, dc, into[t])
        dh = linear(rows[t], back).view(dh.shape)
        if carry is not None:
            dc, dh = (carry[t], dh) if cell.memory else (None, dh + carry[t])
    return _adjoint(trace, dq, states, dh, dc)


def _adjoint(trace: Trace, dq: Tensor, states: list[Tensor], dh: Tensor, dc: Tensor | None) -> Adjoint:
    projected = torch.stack(states[::-1])[..., 0, :] if trace.projects else None
    return Adjoint(dq, projected, dh[:, :, 0], None if dc is None else dc[:, :, 0])


def gradients_of_states(
    trace: Trace, adjoint: Adjoint, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """At every step, the gradients `[T, V, N, H]` of the hidden (unprojected) and of the cell state.

    They are those with which a recurrence that started from `dy`, `dh` and `dc` entered each step.
    """
    cell, dq = trace.cell, adjoint.dq
    states = adjoint.dh
    if states is None:
        later = cell.of_hidden(dq[1:]) @ trace.params["weight_hh"]
        carry = cell.of_carry(dq[1:])
        later = later if carry is None or cell.memory else later + carry
        last = torch.zeros_like(dq[:1, :, :, 0]) if dh is None else dh[None]
        states = torch.cat([later, last]) if dy is None else torch.cat([later, last]) + dy
    dm = states @ trace.params["weight_hr"] if trace.projects else states
    if not cell.memory:
        return dm, None
    carried = cell.of_carry(dq[1:])
    assert carried is not None
    return dm, torch.cat([carried, torch.zeros_like(dm[:1]) if dc is None else dc[None]])
