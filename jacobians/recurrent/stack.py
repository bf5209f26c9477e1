"""The layers of a recurrent network on top of each other, each reading in one direction or in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.products import add_up
from bpk.jacobians.recurrent import back as recurrent_back
from bpk.jacobians.recurrent import forth as recurrent_forth
from bpk.jacobians.recurrent.back import Adjoint
from bpk.jacobians.recurrent.cells import Cell
from bpk.jacobians.recurrent.forth import Tangent
from bpk.jacobians.recurrent.scan import ROLES, Scan, Trace


@dataclass
class Seeds:
    """The outputs of a stack, or gradients or tangents of them (`None`: zero).

    `y` is the output `[T, (V,) N, P]` of all directions, `h` and `c` the last states, `[(V,) N, scans, *]`.
    """

    y: Tensor | None = None
    h: Tensor | None = None
    c: Tensor | None = None

    def columns_last(self) -> Seeds:
        """The same columns, next to each other in memory."""
        parts = zip((self.y, self.h, self.c), (1, 0, 0), strict=True)
        return Seeds(*(None if x is None else next_to_each_other(x, k) for x, k in parts))


@dataclass
class Pulled:
    """What came of some columns: an `Adjoint` for each scan, and the gradient of the input, on demand."""

    adjoints: list[list[Adjoint]]
    input: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """How many numbers are held."""
        return sum(a.dq.numel() for row in self.adjoints for a in row)

    def state(self, index: int) -> Tensor:
        """The gradient `[V, N, scans, *]` of the initial hidden (1) or cell (2) state."""
        found = [a.dh0 if index == 1 else a.dc0 for layer in self.adjoints for a in layer]
        return torch.stack([x for x in found if x is not None], 2)


class Stack:
    """A recurrent layer at the point of a call. States are `[N, scans, *]`, sequences time first.

    `masks` are what the outputs `[T, N, *]` of all layers but the last were multiplied by (dropout), if they were.
    """

    def __init__(
        self,
        cell: Cell,
        layers: Sequence[Sequence[Scan]],
        params: Mapping[str, Tensor],
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        known: Callable[[int], Tensor | None] | None = None,
        masks: Sequence[Tensor] = (),
    ) -> None:
        self.cell = cell
        self.masks = [wide(mask) for mask in masks]
        self.params = {name: wide(p) for name, p in params.items()}
        self.traces: list[list[Trace]] = []
        x, h0, c0 = wide(x), None if h0 is None else wide(h0), None if c0 is None else wide(c0)
        for k, scans in enumerate(layers):
            x = self.entering(k, x)
            y = None if known is None else known(k)
            row = self.layer(scans, x, h0, c0, y)
            if known is not None and (y is None or not all(trace.agrees() for trace in row)):
                y = self.replayed(row)
                row = self.layer(scans, x, h0, c0, y)
            self.traces.append(row)
            x = torch.cat([trace.y for trace in row], -1) if y is None else wide(y)
        self.y = x

    def entering(self, k: int, sequence: Tensor) -> Tensor:
        """Dropout on the way into layer `k`, of an output `[T, N, *]` or of columns `[T, V, N, *]`.

        Entries are multiplied by numbers, so that gradients take the same way back.
        """
        if not k or not self.masks:
            return sequence
        mask = self.masks[k - 1][: len(sequence)]
        return sequence * (mask if sequence.dim() == mask.dim() else mask[:, None])

    def layer(
        self, scans: Sequence[Scan], x: Tensor, h0: Tensor | None, c0: Tensor | None, y: Tensor | None
    ) -> list[Trace]:
        """The scans of a layer; `y` is its output where it is known."""
        parts = [None] * len(scans) if y is None else y.chunk(len(scans), -1)
        row = []
        for scan, part in zip(scans, parts, strict=True):
            own = scan.by_role(self.params)
            row.append(Trace(self.cell, scan, own, x, *self.start(own, scan, x, h0, c0), part))
        return row

    def start(
        self, own: Mapping[str, Tensor], scan: Scan, x: Tensor, h0: Tensor | None, c0: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The initial states of a scan, `[N, P]` and `[N, H]`."""
        width, hidden = own["weight_hh"].shape[1], own["weight_hh"].shape[0] // self.cell.gates
        h = x.new_zeros(x.shape[1], width) if h0 is None else h0[:, scan.number]
        c = x.new_zeros(x.shape[1], hidden) if c0 is None else c0[:, scan.number]
        return h, c if self.cell.memory else None

    def replayed(self, row: Sequence[Trace]) -> Tensor:
        """The output `[T, N, *]` of a layer by torch's own function for it."""
        h, c = torch.stack([trace.h0 for trace in row]), [trace.c0 for trace in row if trace.c0 is not None]
        start = (h, torch.stack(c)) if c else h
        flat = [trace.params[role] for trace in row for role in ROLES if role in trace.params]
        biased = "bias_ih" in row[0].params
        return self.cell.layer(row[0].x, start, flat, biased, 1, 0.0, False, len(row) == 2, False)[0]

    @property
    def size(self) -> int:
        """How many numbers a backward recurrence finds for one column of one sample."""
        hidden = self.params[f"weight_hh{self.traces[0][0].scan.suffix}"].shape[0] // self.cell.gates
        return len(self.traces[0][0].x) * hidden * sum(self.cell.parts) * sum(map(len, self.traces))

    def of_samples(self, here: slice) -> Stack:
        """The same for some samples, for what goes back in time."""
        alone = copy(self)
        alone.masks = [mask[:, here] for mask in self.masks]
        alone.traces = [[trace.of_samples(here) for trace in row] for row in self.traces]
        return alone

    @property
    def forward_only(self) -> bool:
        """Whether nothing depends on later steps."""
        return not any(trace.scan.reverse for row in self.traces for trace in row)

    def results(self) -> Seeds:
        """The output and the last states."""
        return Seeds(self.y, self.result(1), self.result(2) if self.cell.memory else None)

    def result(self, number: int) -> Tensor:
        """The output `[T, N, *]` (0), or the last hidden (1) or cell (2) states `[N, scans, *]`."""
        if number == 0:
            return self.y
        every = [trace for row in self.traces for trace in row]
        states = [trace.hidden[-1] if number == 1 else trace.c_n for trace in every]
        return torch.stack([state for state in states if state is not None], 1)

    def find(self, param: str) -> tuple[int, int, str]:
        """Layer and position of the scan that a parameter belongs to, and its role there."""
        traces = ((k, j, trace) for k, row in enumerate(self.traces) for j, trace in enumerate(row))
        return next((k, j, role) for k, j, t in traces for role in t.params if role + t.scan.suffix == param)

    def pull(self, seeds: Seeds, to_input: bool = False) -> Pulled:
        """Back through all layers, and `to_input`."""
        dy, adjoints = seeds.y, list[list[Adjoint]]()
        for k in reversed(range(len(self.traces))):
            pairs, further = self.seeds_of(k, dy, seeds), k > 0 or to_input
            row = [recurrent_back.pull(trace, *given, further) for trace, given in pairs]
            adjoints.insert(0, row)
            if k:
                dy = self.input_gradient(k, row)
        return Pulled(adjoints, lambda: self.input_gradient(0, adjoints[0]))

    def seeds_of(
        self, k: int, dy: Tensor | None, seeds: Seeds
    ) -> Iterator[tuple[Trace, tuple[Tensor | None, Tensor | None, Tensor | None]]]:
        """The scans of a layer, with the gradients of their outputs and of their last states."""
        row = self.traces[k]
        parts = [None] * len(row) if dy is None else dy.chunk(len(row), -1)
        for trace, part in zip(row, parts, strict=True):
            h, c = (None if s is None else s[:, :, trace.scan.number] for s in (seeds.h, seeds.c))
            yield trace, (None if part is None else trace.scan.turned(part), h, c)

    def input_gradient(self, k: int, row: Sequence[Adjoint]) -> Tensor:
        """The gradient `[T, V, N, I]` of the input of a layer, before dropout."""
        parts = []
        for trace, adjoint in zip(self.traces[k], row, strict=True):
            dx = adjoint.dx
            if dx is None:
                dx = recurrent_back.sent_back(self.cell.of_input(adjoint.dq), trace.params["weight_ih"])
            parts.append(trace.scan.turned(dx))
        return self.entering(k, add_up(parts))

    def push(
        self, x: Tensor | None, h: Tensor | None, c: Tensor | None, params: Mapping[str, Tensor], lead: int
    ) -> tuple[Seeds, list[list[Tangent]]]:
        """Forward through all layers, from `lead` tangents of the input, the initial states and the parameters."""
        tangents: list[list[Tangent]] = []
        for k, row in enumerate(self.traces):
            found, x = [], None if x is None else self.entering(k, x)
            for trace in row:
                like = trace.m.new_zeros(lead, *trace.m.shape[1:])
                h0, c0 = (None if s is None else s[:, :, trace.scan.number] for s in (h, c))
                given = None if x is None else trace.scan.turned(x)
                found.append(recurrent_forth.push(trace, given, h0, c0, trace.scan.by_role(params), like))
            tangents.append(found)
            x = torch.cat([tr.scan.turned(ta.y) for tr, ta in zip(row, found, strict=True)], -1)
        last = [ta for row in tangents for ta in row]
        states = torch.stack([ta.y[-1] for ta in last], 2)
        cells = torch.stack([ta.c for ta in last if ta.c is not None], 2) if self.cell.memory else None
        return Seeds(x, states, cells), tangents


def next_to_each_other(x: Tensor, axis: int) -> Tensor:
    """The same tensor, with this axis innermost in memory, then those before the last."""
    order = [*range(axis), *reversed(range(axis, x.dim()))]
    return x.permute(order).contiguous().permute(order)
