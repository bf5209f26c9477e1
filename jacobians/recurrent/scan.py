"""One layer of a recurrent network in one direction, evaluated at a point.

Sequences are time first: `[T, N, *]`. `P` is the size of the hidden state (`H`, or that of
the projection), `O = G H` the number of pre-activations, `K` that of local variables of a hidden unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.core.numeric import linear, wide
from bpk.jacobians.recurrent.cells import Cell, Slopes

ROLES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


@dataclass(frozen=True)
class Scan:
    """Where a scan finds its parameters (`weight_ih_l0_reverse`), its states, and which way it reads."""

    suffix: str = ""
    number: int = 0
    reverse: bool = False

    def by_role(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its parameters by role."""
        return {role: params[role + self.suffix] for role in ROLES if role + self.suffix in params}

    def turned(self, sequence: Tensor) -> Tensor:
        """A sequence in the order of reading."""
        return sequence.flip(0) if self.reverse else sequence


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
        self._c_n: Tensor | None = None
        self.tolerance = 0.0 if y is None else torch.finfo(y.dtype).eps ** 0.5
        if y is not None:
            self.hidden = scan.turned(wide(y))

    @cached_property
    def hidden(self) -> Tensor:
        """The hidden states `[T, N, P]` in the order of reading."""
        return self.unroll()

    @cached_property
    def before(self) -> Tensor:
        """The hidden states before each step `[T, N, P]`."""
        return torch.cat([self.h0[None], self.hidden[:-1]])

    @cached_property
    def back(self) -> Tensor:
        """What sends gradients to the hidden state before a step and to the input at once, `[P + I, O]`."""
        return torch.cat([self.params["weight_hh"].T, self.params["weight_ih"].T])

    @property
    def projects(self) -> bool:
        """Whether hidden states are projected."""
        return "weight_hr" in self.params

    @property
    def units(self) -> int:
        """`H`, the number of hidden units."""
        return self.params["weight_hh"].shape[0] // self.cell.gates

    def projected(self, m: Tensor) -> Tensor:
        """Hidden states of those before the projection, or tangents of them."""
        return m @ self.params["weight_hr"].T if self.projects else m

    @property
    def y(self) -> Tensor:
        """The output `[T, N, P]` in the order of time."""
        return self.scan.turned(self.hidden)

    @property
    def c_n(self) -> Tensor | None:
        """The last cell state `[N, H]`."""
        if self._c_n is None and self.cell.memory:
            self.unroll()
        return self._c_n

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
        self._q, self._m, self._c_n = torch.stack(local), torch.stack(middle), c
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
            a = linear(self.x, self.params["weight_ih"])
            b = linear(self.before, self.params["weight_hh"])
            for part, name in ((a, "bias_ih"), (b, "bias_hh")):
                if name in self.params:
                    part += self.params[name]
            self._slopes, self._m = self.cell.replay(a, b, self.before, self.c0)
        return self._slopes

    @property
    def m(self) -> Tensor:
        """Hidden states before the projection `[T, N, H]`."""
        if not self.projects:
            return self.hidden
        if self._m is None:
            _ = self.slopes
        assert self._m is not None
        return self._m

    def of_samples(self, here: slice) -> Trace:
        """The same for some samples, for what goes back in time."""
        _ = self.back  # once for all samples
        alone, at = copy(self), self.slopes
        alone._slopes = Slopes(at.slope[:, here], None if at.via is None else at.via[:, here])
        alone.hidden, alone.before = self.hidden[:, here], self.before[:, here]
        return alone

    def agrees(self) -> bool:
        """Whether the known output is that of the cell: it may have been changed in place since."""
        _ = self.slopes
        assert self._m is not None
        h = F.linear(self._m, self.params["weight_hr"]) if self.projects else self._m
        return bool(((h - self.hidden).abs() <= self.tolerance).all())

    def value(self, role: str) -> Tensor | None:
        """What a weight is multiplied with at each step, `[T, N, *]` (`None` for a bias)."""
        if role == "weight_hr":
            return self.m
        return {"weight_ih": self.x, "weight_hh": self.before}.get(role)
