"""Back in time: what came of columns at the results of a scan, by one recurrence for all that asks.

Columns are time first: `[T, V, N, *]`. In memory, columns may lie next to each other ("columns last"), which products
that sum over columns read without copying; results then lie as what was given.
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
    projected), `dh0` and `dc0` `[V, N, *]` to the initial states, `dx` `[T, V, N, I]` to the input, where it was found
    on the way.
    """

    dq: Tensor
    dh: Tensor | None
    dh0: Tensor
    dc0: Tensor | None
    dx: Tensor | None = None

    def of(self, trace: Trace, role: str) -> Tensor:
        """The gradient `[T, V, N, O]` of what a weight makes or a bias is added to."""
        if role == "weight_hr":
            assert self.dh is not None
            return self.dh
        return trace.cell.of_input(self.dq) if role.endswith("_ih") else trace.cell.of_hidden(self.dq)


def is_columns_last(x: Tensor) -> bool:
    """Whether the entries of columns `[V, N, *]` lie next to each other in memory."""
    return x.stride(0) == 1 < len(x)


def matrices(rows: Tensor) -> tuple[Tensor, ...]:
    """`[T, V, N, O]` as a matrix `[V N, O]` (columns last: `[N V, O]`) for each step, without copying."""
    return (rows.transpose(1, 2) if is_columns_last(rows[0]) else rows).flatten(1, 2).unbind()


def times(matrix: Tensor, back: Tensor, v: int, n: int, columns_last: bool) -> Tensor:
    """A matrix of one step times `back^T`, `[V, N, I]`, in the same memory order."""
    if columns_last:
        return linear(back, matrix).view(-1, n, v).permute(2, 1, 0)
    return linear(matrix, back).view(v, n, -1)


def sent_back(rows: Tensor, weight: Tensor) -> Tensor:
    """`[T, V, N, O]` times a weight `[O, I]`: `[T, V, N, I]`."""
    if not is_columns_last(rows[0]):
        return linear(rows, weight.T)
    back, (v, n) = weight.T.contiguous(), rows.shape[1:3]
    products = torch.stack([linear(back, matrix) for matrix in matrices(rows)])
    return products.view(len(rows), -1, n, v).permute(0, 3, 2, 1)


def pull(
    trace: Trace,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    to_input: bool = False,
    local: Tensor | None = None,
    middle: Tensor | None = None,
) -> Adjoint:
    """From the gradients of the output `[T, V, N, P]` and of the last states `[V, N, *]`.

    `local` `[T, V, N, K, H]` is added to the gradients of the local variables, `middle` `[T, V, N, H]` to those of the
    hidden states before the projection. If `dy` has fewer steps, the rest of the sequence is left out. `to_input` says
    that the gradient of the input will be asked for: it is found on the way where one product gives both.
    """
    like = next(x for x in (dh, dc, None if dy is None else dy[0]) if x is not None)
    if dh is None:
        (v, n), width = like.shape[:2], trace.before.shape[-1]
        last = is_columns_last(like)
        dh = like.new_zeros(width, n, v).permute(2, 1, 0) if last else like.new_zeros(v, n, width)
    dh, dc = dh[:, :, None], None if dc is None else dc[:, :, None]  # as one local variable
    given = None if dy is None else dy[:, :, :, None].unbind()
    if torch.is_grad_enabled() or local is not None or middle is not None:
        return _pull(trace, given, dh, dc, local, middle)
    return _pull_into_buffers(
        trace, given, dh, dc, to_input and is_columns_last(dh) and trace.cell.inputs == trace.cell.hidden
    )


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


def _pull_into_buffers(
    trace: Trace, dy: Sequence[Tensor] | None, dh: Tensor, dc: Tensor | None, to_input: bool
) -> Adjoint:
    """Without a graph; all views are made beforehand, so that a step is four or five operations."""
    cell, slopes, back = trace.cell, trace.slopes, trace.back if to_input else trace.params["weight_hh"].T
    steps = len(trace.hidden) if dy is None else len(dy)
    (v, n), sizes, last = dh.shape[:2], slopes.slope.shape[2:], is_columns_last(dh)
    dq = dh.new_empty(steps, *sizes, n, v).permute(0, 4, 3, 1, 2) if last else dh.new_empty(steps, v, n, *sizes)
    slope = list(zip(*[part.unbind() for part in slopes.slope.split(cell.parts, -2)], strict=True))
    into = list(zip(*[part.unbind() for part in dq.split(cell.parts, -2)], strict=True))
    via = None if slopes.via is None else slopes.via.unbind()
    carry = None if cell.carried is None else dq.narrow(-2, cell.carried, 1).unbind()
    rows = matrices(cell.of_hidden(dq))
    states, found, width = [], [], trace.before.shape[-1]
    for t in reversed(range(steps)):
        if dy is not None:
            dh = dh + dy[t]
        if trace.projects:
            states.append(dh)
        dm = dh @ trace.params["weight_hr"] if trace.projects else dh
        cell.pull_into(slope[t], None if via is None else via[t], dm, dc, into[t])
        sent = times(rows[t], back, v, n, last)[:, :, None]
        dh = sent[..., :width] if to_input else sent
        if to_input:
            found.append(sent[:, :, 0, width:])
        if carry is not None:
            dc, dh = (carry[t], dh) if cell.memory else (None, dh + carry[t])
    dx = torch.stack([x.permute(2, 1, 0) for x in found[::-1]]).permute(0, 3, 2, 1) if to_input else None
    return _adjoint(trace, dq, states, dh, dc, dx)


def _adjoint(
    trace: Trace, dq: Tensor, states: list[Tensor], dh: Tensor, dc: Tensor | None, dx: Tensor | None = None
) -> Adjoint:
    projected = torch.stack(states[::-1])[..., 0, :] if trace.projects else None
    return Adjoint(dq, projected, dh[:, :, 0], None if dc is None else dc[:, :, 0], dx)


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
