"""Rows of parameters that functions spread over samples, from what has come to these functions: whole, or in pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.numeric import MEMORY, slices
from bpk.jacobians.core.outer import Some
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.rows_through import RowsThrough
from bpk.plan.broadcast_places import Spread
from bpk.plan.graph import gradient_edge, pull_columns
from bpk.plan.parameter_bottleneck import ParameterBottleneck
from bpk.plan.parts import in_parts
from bpk.plan.row_products import ALL
from bpk.recording import engine
from bpk.recording.graph.nodes import Edge

PIECE = 1 << 19
"""How many numbers a piece has on a processor, so that what makes it and what reads it find it in cache."""

Arrived = Mapping[Node, Tensor | None]
"""Columns `[V, *result]` at the results of functions."""


class Piece(NamedTuple):
    """Rows of some columns and of some of the samples that were asked for, by number of the parameter."""

    columns: slice
    samples: slice
    rows: Mapping[int, Tensor | RowsThrough]


@dataclass(eq=False)
class SpreadRows:
    """Rows `[V, N, *p]` of parameters for `count` samples, from what has come to the functions that spread them.

    `places` has, by number of a parameter, the functions, and where their results hold the rows; `outputs` what has
    been found of entries that belong to single outputs (see `by_output.py`).
    """

    params: Sequence[Tensor]
    places: Mapping[int, Sequence[tuple[Spread, int]]]
    count: int
    device: torch.device
    bottlenecks: dict[Edge, ParameterBottleneck] = field(default_factory=dict)
    outputs: dict[Spread, dict[int, Tensor]] = field(default_factory=dict)

    def without(self, some: Collection[int]) -> SpreadRows:
        """The same without some of the parameters."""
        if not some:
            return self
        places = {k: uses for k, uses in self.places.items() if k not in some}
        return SpreadRows(self.params, places, self.count, self.device, self.bottlenecks)

    @property
    def room(self) -> int:
        """How many numbers a piece has."""
        return PIECE if self.device.type == "cpu" else MEMORY

    @property
    def uses(self) -> list[Spread]:
        """The functions."""
        return list(dict.fromkeys(use for uses in self.places.values() for use, _ in uses))

    @property
    def size(self) -> int:
        """How many numbers the rows of one sample have where they are most."""
        read = sum(torch.Size(use.shape).numel() for use in self.uses)
        return max(1, read, sum(in_parts(self.params[k]).numel() for k in self.places))

    def pieces(self, arrived: Arrived, dtype: torch.dtype, samples: Tensor | None = None) -> Iterator[Piece]:
        """The rows of all samples, or of these, a few at a time where they are many; together they are all there are.

        What passes something smaller is not taken apart.
        """
        if not self.places:
            return
        columns = next((len(mat) for mat in arrived.values() if mat is not None), 0)
        rows, size, room = self.count if samples is None else len(samples), self.size, self.room
        if columns * rows * size <= room or any(self.narrows(uses, columns * rows) for uses in self.places.values()):
            yield Piece(ALL, ALL, self.rows(arrived, columns, dtype, ALL if samples is None else samples))
            return
        for here in slices(rows, max(1, room // (columns * size))):
            some = here if samples is None else samples[here]
            for these in slices(columns, max(1, room // size)):
                part = {node: None if mat is None else mat[these] for node, mat in arrived.items()}
                yield Piece(these, here, self.rows(part, these.stop - these.start, dtype, some, narrow=False))

    def rows(
        self, arrived: Arrived, columns: int, dtype: torch.dtype, some: Some = ALL, narrow: bool = True
    ) -> dict[int, Tensor | RowsThrough]:
        """By number of the parameter: `[V, N, *p]` of so many columns, and of some samples.

        They may be given through something smaller that they pass, where that takes less (`narrow`).
        """
        if not (self.count if isinstance(some, slice) else len(some)):
            return {k: self.no_rows(columns, some, self.params[k], dtype) for k in self.places}
        made: dict[Spread, Tensor] = {}  # several parameters share what is computed from them
        shared: dict[Spread, list[int]] = {}
        for k, uses in self.places.items():
            for use, place in uses:
                grad = arrived[use.node]
                if grad is not None:
                    made[use] = use.of_samples(grad, place, self.count, some) if use not in made else made[use]
                    shared.setdefault(use, []).append(k)
        found: dict[int, Tensor | RowsThrough] = {}
        narrowed: dict[tuple[Node, Edge], Tensor] = {}
        known: dict[Spread, dict[int, Tensor]] = {}
        for k, uses in self.places.items():
            p = self.params[k]
            parts = [(use, made[use]) for use, _ in uses if use in made]
            through = self.through_bottlenecks(parts, p, dtype, narrowed) if narrow else None
            if through is not None:
                found[k] = through
                continue
            for use, rows in parts:
                if use not in known:
                    params = [self.params[other] for other in shared[use]]
                    known[use] = dict(zip(shared[use], at_parameters(rows, use, params), strict=True))
            each = [in_parts(known[use][k]) for use, _ in parts]
            found[k] = add_up(each).to(dtype) if each else self.no_rows(columns, some, p, dtype)
        return found

    def through_bottlenecks(
        self,
        parts: Sequence[tuple[Spread, Tensor]],
        param: Tensor,
        dtype: torch.dtype,
        narrowed: dict[tuple[Node, Edge], Tensor],
    ) -> RowsThrough | None:
        """The rows of a parameter through small tensors that are computed from it (`None`: there are none).

        `narrowed` keeps columns there, by function and by what it is given. Functions may be in another precision.
        """
        if not parts or not self.narrows(parts, parts[0][1].shape[:2].numel()) or param.is_complex():
            return None
        columns: list[Tensor] = []
        jacobians: list[Tensor] = []
        for use, rows in parts:
            assert use.start is not None
            narrow, place = self.bottleneck(use.start), (use.node, use.start)
            if place not in narrowed:
                narrowed[place] = narrow.columns(rows).to(dtype)
            columns.append(narrowed[place])
            jacobians.append(narrow.jacobian(param).to(dtype))
        return RowsThrough(torch.cat(columns, 2), torch.cat(jacobians))

    def narrows(self, uses: Sequence[tuple[Spread, object]], rows: int) -> bool:
        """Whether all that functions spread is computed from something smaller, which is the way for so many rows."""
        for use, _ in uses:
            if use.start is None or engine.kind_of_output(*use.start)[1].is_complex:
                return False
            if not self.bottleneck(use.start).pays(rows):
                return False
        return True

    def no_rows(self, columns: int, some: Some, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros: nothing comes to a parameter."""
        count = len(range(self.count)[some]) if isinstance(some, slice) else len(some)
        return torch.zeros(columns, count, *in_parts(param).shape, dtype=dtype, device=self.device)

    def bottleneck(self, start: Edge) -> ParameterBottleneck:
        """What `start` is computed from, looked for once."""
        if start not in self.bottlenecks:
            self.bottlenecks[start] = ParameterBottleneck(start, self.device)
        return self.bottlenecks[start]


def at_parameters(rows: Tensor, use: Spread, params: Sequence[Tensor]) -> list[Tensor]:
    """Rows `[V, R, ...]` of what a function spreads as rows of the parameters that this is computed from."""
    if use.start is None:
        return [rows] * len(params)
    pulled = pull_columns([gradient_edge(use.start)], params, (rows.flatten(0, 1),))
    lead = rows.shape[:2]
    pairs = zip(pulled, params, strict=True)
    return [rows.new_zeros(*lead, *p.shape) if g is None else g.unflatten(0, lead) for g, p in pairs]
