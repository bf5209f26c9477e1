"""The diagonal of the residual in the parameters of a recurrence, by matrices over time in the place of unit vectors.

Layers on top of each other are one recurrence of their states `s = (m_1, c_1, m_2, ...)`, in which they take turns.
In its turn a layer has the local variables `q = Q s + e`, and replaces its own states: tangents go `s <- J s + B e`.
Whatever is asked of the lowest layer acts by `e` alone: entry `ij` of a weight adds `u_tj` to `e_ti` at every step `t`,
for the values `u` that it is multiplied with. Let `C` be the cell's second derivative, contracted with the gradients of
its states. Back in time, the second derivative `V` in the states is, before a turn,

    V <- J^T V J + Q^T C Q,  with  V_se = J^T V B + Q^T C,  V_ee = B^T V B + C,

and forward in time, with the states `p_ti` before step `t'` that come of `e_ti = 1` at a step `t < t'`,

    G_i[t, t'] = G_i[t', t] = p_ti^T V_se[:, i],  G_i[t', t'] = V_ee[i, i].

The diagonal is `sum_tt' G_i[t, t'] u_tj u_t'j`, or `sum_tt' G_i[t, t']` for a bias. The values of `W_hh` depend on how
it was used before; with the gradients `d` of what it makes, this adds `2 sum_(t < t') d_t'i (W_hr p_ti)_j u_tj`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.side_by_side import pick
from bpk.jacobians.recurrent.residual import Point
from bpk.jacobians.recurrent.stack import Stack


@dataclass
class Turn:
    """What a layer does in its turns, for some samples: its local variables are `local` `[S, T N or 1, K, H]` (`Q^T`),
    and its part `own` of the states becomes `forth` `[T, N, S, S_k]`, the columns of `J^T` that are not a one."""

    own: slice
    local: Tensor
    forth: Tensor
    curved: Tensor  # Q^T C Q [T, N, S, S]

    def push(self, t: int, p: Tensor) -> Tensor:
        """`p J^T` for rows `[N, R, S]`: the states after a turn."""
        new = p @ self.forth[t]
        if new.shape == p.shape:
            return new
        return torch.cat([p[..., : self.own.start], new, p[..., self.own.stop :]], -1)

    def pull(self, t: int, v: Tensor) -> Tensor:
        """`v J` for rows `[N, R, S]`: from gradients of the states after a turn to those before."""
        back = v[..., self.own] @ self.forth[t].mT
        if self.forth.shape[2] == self.forth.shape[3]:
            return back
        rest = v.clone()
        rest[..., self.own] = 0
        return back.add_(rest)


class Recurrence:
    """Some layers, one on top of the other and read in one direction, at some samples."""

    def __init__(self, stack: Stack, lowest: int, row: Sequence[Point], seconds: Sequence[Tensor], here: slice) -> None:
        """`seconds` are `C` `[T, K, N, K, H]` of the layers, of all samples."""
        self.stack, self.lowest, self.points, self.here = stack, lowest, row, here
        self.cell, self.states = stack.cell, 1 + stack.cell.memory
        self.widths = [self.states * point.trace.units for point in row]
        self.second = [second[:, :, here] for second in seconds]
        steps, kinds, n, _, units = self.second[0].shape
        eye = self.second[0].new_ones(kinds).diag()[:, None, :, None]
        acts = self.pushed(0, eye).view(kinds, steps, n, self.states, units)
        self.act = acts.permute(1, 2, 4, 3, 0).contiguous()  # B: [T, N, H, c, K]
        self.turns = [self.turn(k) for k in range(len(row))]

    def pushed(self, k: int, q: Tensor) -> Tensor:
        """The new states `[V, T N, S_k]` of a layer that come of local variables `[V, T N or 1, K, H]`."""
        at = self.points[k].trace.slopes
        slope, via = (None if x is None else x[:, self.here].flatten(0, 1) for x in (at.slope, at.via))
        assert slope is not None
        return torch.cat([x for x in self.cell.push(slope, via, q) if x is not None], -1)

    def turn(self, k: int) -> Turn:
        """What the `k`-th of these layers does."""
        second = self.second[k].transpose(1, 2)
        shape = second.shape[:2]
        parts = torch.eye(sum(self.widths), dtype=second.dtype, device=second.device)[:, None].split(self.widths, 2)
        local, start = self.local(k, parts), sum(self.widths[:k])
        forth = self.pushed(k, local).unflatten(1, shape).permute(1, 2, 0, 3).contiguous()
        bent = torch.einsum("sbjh,bjkh->bkhs", local, second.flatten(0, 1)).flatten(1, 2)
        curved = local.transpose(0, 1).flatten(2) @ bent
        return Turn(slice(start, start + self.widths[k]), local, forth, curved.unflatten(0, shape))

    def local(self, k: int, parts: Sequence[Tensor]) -> Tensor:
        """Local variables `[V, T N or 1, K, H]` of a layer that come of the states of all layers `[V, 1, S_k]`."""
        trace, masks = self.points[k].trace, self.stack.masks
        hidden = trace.projected(parts[k][..., : trace.units])
        b = hidden @ trace.params["weight_hh"].T
        a = torch.zeros_like(b)
        if k:
            below = self.points[k - 1].trace
            x = below.projected(parts[k - 1][..., : below.units])
            x = x * masks[self.lowest + k - 1][:, self.here].flatten(0, 1) if masks else x
            a = x @ trace.params["weight_ih"].T
        carry = parts[k][..., trace.units :] if self.cell.memory else hidden
        return self.cell.assemble(a, *(x.expand(*a.shape[:2], -1) for x in (b, carry)))

    def back(self) -> tuple[list[Tensor], Tensor]:
        """Where the lowest layer has its turn: `J^T V` `[N, S, S_0]` before it, and `V` `[T, N, S_0, S_0]` after it."""
        v, own = torch.zeros_like(self.turns[0].curved[0]), self.turns[0].own
        before, after = list[Tensor](), list[Tensor]()
        for t in reversed(range(len(self.act))):
            for turn in reversed(self.turns):
                left = turn.pull(t, v).mT
                if turn is self.turns[0]:
                    after.append(v[:, own, own])
                    before.append(left[..., own])
                v = turn.pull(t, left) + turn.curved[t]
        return before[::-1], torch.stack(after[::-1])

    def of_input(self) -> Tensor:
        """The second derivative in the input of the lowest layer, in the order of reading: `[N, T I, T I]`."""
        before, after = self.back()
        weight, second = self.points[0].trace.params["weight_ih"].T[:, None], self.second[0].transpose(1, 2)
        zero, shape = torch.zeros_like(weight), second.shape[:2]
        q = self.cell.assemble(weight, zero, zero[..., : second.shape[-1]])  # [I, 1, K, H]
        act = self.pushed(0, q).unflatten(1, shape).permute(1, 2, 0, 3)  # [T, N, I, S_0]
        bent = torch.einsum("sbjh,bjkh->bkhs", q, second.flatten(0, 1)).flatten(1, 2)
        own, mixed = ((x.transpose(0, 1).flatten(2) @ bent).unflatten(0, shape) for x in (q, self.turns[0].local))
        own, width = own + act @ after @ act.mT, len(weight)
        found = own.new_empty(shape[1], shape[0] * width, shape[0] * width)
        start = torch.nn.functional.pad(act, (0, sum(self.widths[1:])))
        p = start[0, :, :0]
        for t in range(len(act)):
            here = slice(t * width, (t + 1) * width)
            row = p @ (before[t] @ act[t].mT + mixed[t])
            found[:, : here.start, here], found[:, here, : here.start], found[:, here, here] = row, row.mT, own[t]
            for turn in self.turns if t + 1 < len(act) else ():
                p = turn.push(t, p)
                p = torch.cat([p, start[t]], 1) if turn is self.turns[0] else p
        return found

    def grams(self) -> tuple[Tensor, Tensor]:
        """`G` `[N, K, H, T, T]`, and what depends on earlier uses of `W_hh`, `[N, O, P]`."""
        (reached, after), trace, first = self.back(), self.points[0].trace, self.turns[0]
        steps, n, units, states, kinds = self.act.shape
        after = after.view(steps, n, states, units, states, units).diagonal(dim1=3, dim2=5)  # [T, N, c, c, H]
        own = torch.einsum("tnhck,tncdh,tnhdk->nhkt", self.act, after, self.act)
        own = own + self.second[0].diagonal(dim1=1, dim2=3).permute(1, 2, 3, 0)
        found = own.new_zeros(n, units, kinds, steps, steps)
        found.diagonal(dim1=3, dim2=4).copy_(own)
        acts = self.act.permute(1, 2, 0, 3, 4).contiguous()  # [N, H, T, c, K]
        used = pick(acts, self.cell.hidden, 4).flatten(2, 3).mT.contiguous()  # [N, H, G, T c]
        mix = torch.cat([self.act, self.second[0].permute(0, 2, 4, 1, 3)], 3)  # B and C: [T, N, H, c + K, K]
        local = first.local[:, 0].permute(2, 0, 1).expand(n, -1, -1, -1)  # [N, H, S, K]
        back = self.cell.of_hidden(self.points[0].adjoint.dq[:, 0, self.here])
        back = back.unflatten(-1, (-1, units)).transpose(2, 3)
        before = trace.before[:, self.here].transpose(0, 1)[:, None, :, None]
        again = own.new_zeros(n, units, len(self.cell.hidden), before.shape[-1])
        start = torch.eye(self.widths[0], sum(self.widths), dtype=own.dtype, device=own.device)
        start = start.unflatten(0, (states, units)).transpose(0, 1).expand(n, -1, -1, -1)
        p = start[:, :, :0]  # [N, H, t c, S]: what came of each state of a unit at the steps before
        for t in range(steps):
            if t:
                reach = reached[t].unflatten(2, (states, units)).permute(0, 3, 1, 2)
                seen = (p @ torch.cat([reach, local], 3)) @ mix[t]  # p^T V_se
                row = (seen.unflatten(2, (t, states)) * acts[:, :, :t]).sum(3).mT
                found[..., t, :t] = row
                found[..., :t, t] = row
                moved = trace.projected(p[..., :units]).unflatten(2, (t, states)) * before[:, :, :t]
                again.addcmul_(back[t][..., None], used[..., : t * states] @ moved.flatten(2, 3), value=2)
            for turn in self.turns if t + 1 < steps else ():
                p = turn.push(t, p.flatten(1, 2)).view(p.shape)
                p = torch.cat([p, start], 2) if turn is first else p
        return found.transpose(1, 2), again.transpose(1, 2).flatten(1, 2)
