"""One layer of a recurrent network in one direction: evaluated, and differentiated both ways by one recurrence.

Sequences are time first: `[T, N, *]`, columns `[T, V, N, *]`. `P` is the size of the hidden state (`H`, or that of
the projection), `O = G H` the number of pre-activations, `K` that of local variables of a hidden unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians import gemm
from bpk.jacobians.recurrent_cells import Cell, Slopes

ROLES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


@dataclass(frozen=True)
class Scan:
    """Where a scan finds its parameters (`weight_ih_l0_reverse`), its states, and which way it reads."""

    suffix: str = ""
    number: int = 0
    reverse: bool = False

    def own(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its parameters by role."""
        return {role: params[role + self.suffix] for role in ROLES if role + self.suffix in params}

    def turned(self, sequence: Tensor) -> Tensor:
        """A sequence in the order of reading."""
        return sequence.flip(0) if self.reverse else sequence


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


@dataclass
class Tangent:
    """What one forward recurrence finds out: tangents of the local variables, of the hidden states, of the last `c`."""

    q: Tensor
    m: Tensor
    y: Tensor
    c: Tensor | None


class Trace:
    """A scan at the point of a call: inputs `x` `[T, N, I]`, initial states, and what follows from them on demand.

    `y` is the output in the order of time, where it is known already.
    """

    def __init__(
        self, cell: Cell, scan: Scan, own: dict[str, Tensor], x: Tensor, h0: Tensor, c0: Tensor | None, y: Tensor | None
    ) -> None:
        self.cell, self.scan, self.params = cell, scan, own
        self.x, self.h0, self.c0 = scan.turned(x), h0, c0
        self._slopes: Slopes | None = None
        self._q: Tensor | None = None
        self._m: Tensor | None = None
        self.c_n = c0
        if y is None:
            self.hidden = self.unroll()
        else:
            self.hidden = scan.turned(y)
        self.before = torch.cat([h0[None], self.hidden[:-1]])

    @property
    def projects(self) -> bool:
        """Whether hidden states are projected."""
        return "weight_hr" in self.params

    @property
    def y(self) -> Tensor:
        """The output `[T, N, P]` in the order of time."""
        return self.scan.turned(self.hidden)

    @property
    def h_n(self) -> Tensor:
        """The last hidden state `[N, P]`."""
        return self.hidden[-1]

    def unroll(self) -> Tensor:
        """Step by step: the hidden states `[T, N, P]`, and local variables on the way."""
        a = F.linear(self.x, self.params["weight_ih"], self.params.get("bias_ih"))
        h, c = self.h0, self.c0
        local, middle, hidden = [], [], []
        for t in range(len(a)):
            b = F.linear(h, self.params["weight_hh"], self.params.get("bias_hh"))
            local.append(self.cell.assemble(a[t], b, h if c is None else c))
            m, c = self.cell.output(local[-1])
            middle.append(m)
            h = F.linear(m, self.params["weight_hr"]) if self.projects else m
            hidden.append(h)
        self._q, self._m, self.c_n = torch.stack(local), torch.stack(middle), c
        return torch.stack(hidden)

    @property
    def q(self) -> Tensor:
        """Local variables `[T, N, K, H]`."""
        if self._q is None:
            self.unroll()
        assert self._q is not None
        return self._q

    @property
    def slopes(self) -> Slopes:
        """Local derivatives: of the local variables or, where hidden states alone are known, all at once from these."""
        if self._slopes is None and self._q is not None:
            self._slopes = self.cell.slopes(self._q)
        if self._slopes is None:
            a = gemm.linear(self.x, self.params["weight_ih"])
            b = gemm.linear(self.before, self.params["weight_hh"])
            for part, name in ((a, "bias_ih"), (b, "bias_hh")):
                if name in self.params:
                    part += self.params[name]
            self._slopes, self._m = self.cell.replay(a, b, self.before, self.c0)
        return self._slopes

    @property
    def m(self) -> Tensor:
        """Hidden states before the projection `[T, N, H]`."""
        if self._m is None and self.projects:
            _ = self.slopes
        return self.hidden if self._m is None else self._m

    def value(self, role: str) -> Tensor | None:
        """What a weight is multiplied with at each step, `[T, N, *]` (`None` for a bias)."""
        if role == "weight_hr":
            return self.m
        return {"weight_ih": self.x, "weight_hh": self.before}.get(role)

    def gradient(self, role: str, adjoint: Adjoint) -> Tensor:
        """The gradient `[T, V, N, O]` of what a weight makes or a bias is added to."""
        if role == "weight_hr":
            assert adjoint.dh is not None
            return adjoint.dh
        return self.cell.of_input(adjoint.dq) if role.endswith("_ih") else self.cell.of_hidden(adjoint.dq)

    # ---- the recurrences -------------------------------------------------------------------------
    def pull(self, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None, bend: Tensor | None = None) -> Adjoint:
        """Back in time, from the gradients of the output and of the last states.

        `bend` `[T, V, N, K, H]` is added to the gradients of the local variables.
        """
        like = next(x for x in (dh, dc, None if dy is None else dy[0]) if x is not None)
        if dh is None:
            dh = like.new_zeros(*like.shape[:2], self.before.shape[-1])
        dh, dc = dh[:, :, None], None if dc is None else dc[:, :, None]
        given = None if dy is None else dy[:, :, :, None].unbind()
        if torch.is_grad_enabled():
            return self._pull_with_graph(given, dh, dc, bend)
        steps = len(self.hidden) if given is None else len(given)
        dq = like.new_empty(steps, *like.shape[:2], *self.slopes.slope.shape[2:])
        cell, slopes, back = self.cell, self.slopes, self.params["weight_hh"].T
        slope = list(zip(*[part.unbind() for part in slopes.slope.split(cell.parts, -2)], strict=True))
        into = list(zip(*[part.unbind() for part in dq.split(cell.parts, -2)], strict=True))
        via = None if slopes.via is None else slopes.via.unbind()
        carry = None if cell.carried is None else dq[..., cell.carried : cell.carried + 1, :].unbind()
        rows = cell.of_hidden(dq).flatten(1, 2).unbind()
        states = []
        for t in reversed(range(len(dq))):
            if given is not None:
                dh = dh + given[t]
            if self.projects:
                states.append(dh)
                dm = dh @ self.params["weight_hr"]
            else:
                dm = dh
            cell.pull_into(slope[t], None if via is None else via[t], dm, dc, into[t])
            if bend is not None:
                dq[t] += bend[t]
            dh = gemm.linear(rows[t], back).view(dh.shape)
            if carry is not None:
                dc, dh = (carry[t], dh) if cell.memory else (None, dh + carry[t])
        return self._adjoint(dq, states, dh, dc)

    def _pull_with_graph(self, dy: Sequence[Tensor] | None, dh: Tensor, dc: Tensor | None, bend: Tensor | None) -> Adjoint:
        """The same as an ordinary differentiable expression."""
        cell, via = self.cell, self.slopes.via
        found, states = [], []
        for t in reversed(range(len(self.hidden) if dy is None else len(dy))):
            dh = dh if dy is None else dh + dy[t]
            states.append(dh)
            dm = dh @ self.params["weight_hr"] if self.projects else dh
            dq = cell.pull(self.slopes.slope[t], None if via is None else via[t], dm, dc)
            dq = dq if bend is None else dq + bend[t]
            found.append(dq)
            dh = (cell.of_hidden(dq) @ self.params["weight_hh"]).view(dh.shape)
            carry = cell.of_carry(dq)
            if carry is not None:
                dc, dh = (carry[..., None, :], dh) if cell.memory else (None, dh + carry[..., None, :])
        return self._adjoint(torch.stack(found[::-1]), states, dh, dc)

    def _adjoint(self, dq: Tensor, states: Sequence[Tensor], dh: Tensor, dc: Tensor | None) -> Adjoint:
        projected = torch.stack(states[::-1])[..., 0, :] if self.projects else None
        return Adjoint(dq, projected, dh[:, :, 0], None if dc is None else dc[:, :, 0])

    def push(
        self, x: Tensor | None, h: Tensor | None, c: Tensor | None, params: Mapping[str, Tensor], like: Tensor
    ) -> Tangent:
        """Forward in time, from tangents of the input `[T, V, N, I]`, the initial states and the parameters `[V, *p]`.

        `like` is `[V, N, H]`, for the tangents that are zero.
        """
        own, steps = self.params, len(self.hidden)
        of_input = like.new_zeros(steps, *like.shape[:-1], own["weight_ih"].shape[0])
        of_hidden = torch.zeros_like(of_input)
        if x is not None:
            of_input = of_input + F.linear(x, own["weight_ih"])
        if "weight_ih" in params:
            of_input = of_input + torch.einsum("tni,voi->tvno", self.x, params["weight_ih"])
        if "bias_ih" in params:
            of_input = of_input + params["bias_ih"][:, None]
        if "weight_hh" in params:
            of_hidden = of_hidden + torch.einsum("tni,voi->tvno", self.before, params["weight_hh"])
        if "bias_hh" in params:
            of_hidden = of_hidden + params["bias_hh"][:, None]
        h = like.new_zeros(*like.shape[:-1], own["weight_hh"].shape[1]) if h is None else h
        c = torch.zeros_like(like) if c is None and self.cell.memory else c
        at = self.slopes
        local, middle, output = [], [], []
        for t in range(steps):
            b = of_hidden[t] + h @ own["weight_hh"].T
            local.append(self.cell.assemble(of_input[t], b, h if c is None else c))
            m, c = self.cell.push(at.slope[t], None if at.via is None else at.via[t], local[-1])
            middle.append(m)
            h = m @ own["weight_hr"].T if self.projects else m
            if "weight_hr" in params:
                h = h + torch.einsum("nh,vph->vnp", self.m[t], params["weight_hr"])
            output.append(h)
        return Tangent(torch.stack(local), torch.stack(middle), torch.stack(output), c)
