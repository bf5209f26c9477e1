"""The diagonal of a recurrent layer's residual in each of its parameters: by matrices over time, or by unit vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bpk.jacobians.core.numeric import is_differentiated, slices
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import pick
from bpk.jacobians.recurrent.grams import contracted
from bpk.jacobians.recurrent.residual import Point, points, residual_squares
from bpk.jacobians.recurrent.stack import Seeds, Stack
from bpk.jacobians.recurrent.turns import Recurrence

LIMIT = 1 << 23
"""How many numbers the matrices of some samples may have (of one sample, more)."""


class Diagonals:
    """The diagonals `[N, *p]` of the residual in each parameter of a call whose results have these gradients."""

    def __init__(self, stack: Stack, grad: Seeds) -> None:
        self.stack, self.points = stack, points(stack, grad)
        self.known: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """How many numbers are known."""
        return sum(x.numel() for x in self.known.values())

    def of(self, param: str) -> Tensor:
        """By matrices over time, for all parameters of a scan at once, where all above is one recurrence."""
        layer, place, role = self.stack.find(param)
        row = self.from_scan(layer, place)
        if role == "weight_hr" or row is None or is_differentiated() or not pays(row):
            return self.by_tangents(param)
        if param not in self.known:
            suffix = row[0].trace.scan.suffix
            self.known |= {role + suffix: x for role, x in by_matrices(self.stack, layer, row).items()}
        return self.known[param]

    def from_scan(self, layer: int, place: int) -> list[Point] | None:
        """A scan and all above it, where that is one recurrence."""
        row = [self.points[layer][place]] if layer == len(self.points) - 1 else [*chain(*self.points[layer:])]
        return row if len(row) == len(self.points) - layer else None

    def of_input(self) -> Tensor | None:
        """The residual in the input `[N, T I, T I]`, where all that reads it is one recurrence, or one each way."""
        rows = [self.from_scan(0, place) for place in range(len(self.points[0]))]
        return add_up(of_input(self.stack, row) for row in rows if row) if all(rows) else None

    def by_tangents(self, param: str) -> Tensor:
        """By what the unit vectors of the parameter do, some at a time."""
        shape, n = self.stack.params[param].shape, len(self.points[0][0].dm[0])
        found = []
        for here in slices(shape.numel(), max(1, LIMIT // (self.stack.size * n))):
            at = torch.arange(here.start, here.stop, device=self.stack.y.device)
            units = one_hot(at, shape.numel()).to(self.stack.y.dtype).view(-1, *shape)
            found.append(residual_squares(self.stack, self.points, {param: units}, len(at)))
        return torch.cat(found).T.reshape(n, *shape)


def by_matrices(stack: Stack, lowest: int, row: Sequence[Point]) -> dict[str, Tensor]:
    """The diagonals in the parameters of the lowest of some layers, by role."""
    cell, trace = stack.cell, row[0].trace
    parts = []
    for at in recurrences(stack, lowest, row):
        (grams, again), found = at.grams(), dict[str, Tensor]()
        for role in trace.params.keys() - {"weight_hr"}:
            gram = pick(grams, cell.inputs if role.endswith("_ih") else cell.hidden, 1).flatten(1, 2)
            values = trace.value(role)
            found[role] = contracted(gram, None if values is None else values[:, at.here])
        found["weight_hh"] = found["weight_hh"] + again
        parts.append(found)
    return {role: torch.cat([part[role] for part in parts]) for role in parts[0]}


def of_input(stack: Stack, row: Sequence[Point]) -> Tensor:
    """The residual `[N, T I, T I]` in what the lowest of all layers reads."""
    found = torch.cat([at.of_input() for at in recurrences(stack, 0, row)])
    steps = len(row[0].trace.x)
    grid = found.view(len(found), steps, -1, steps, found.shape[-1] // steps)
    return (grid.flip(1, 3) if row[0].trace.scan.reverse else grid).reshape(found.shape)


def recurrences(stack: Stack, lowest: int, row: Sequence[Point]) -> Iterator[Recurrence]:
    """The recurrence of some layers, for some samples at a time."""
    steps, n, kinds = row[0].trace.slopes.slope.shape[:3]
    eye = torch.eye(kinds, dtype=row[0].dm.dtype, device=row[0].dm.device)[:, None, :, None]
    seconds = [point.second(eye.expand(steps, kinds, n, kinds, point.trace.units)) for point in row]
    for here in slices(n, max(1, LIMIT // numbers(row))):
        yield Recurrence(stack, lowest, row, seconds, here)


def sizes(row: Sequence[Point]) -> tuple[int, int, int, int, int]:
    """`T`, `K`, `H`, the states of a unit, and those of all layers."""
    steps, _, kinds, units = row[0].trace.slopes.slope.shape
    states = 1 + row[0].trace.cell.memory
    return steps, kinds, units, states, sum(states * point.trace.units for point in row)


def numbers(row: Sequence[Point]) -> int:
    """How many numbers the matrices of one sample have."""
    t, kinds, units, states, width = sizes(row)
    return t * (width * (2 * width + kinds * units) * len(row) + 2 * states * units * width + kinds * units * t)


def pays(row: Sequence[Point]) -> bool:
    """Whether matrices take fewer multiplications than one tangent for each entry: not for very long sequences."""
    t, kinds, units, states, width = sizes(row)
    weights = [[p for p in point.trace.params.values() if p.dim() == 2] for point in row]
    reach = states * units * width**2 + 2 * kinds * units * sum(p.shape[1] for p in weights[0])
    entries = sum(p.numel() for p in row[0].trace.params.values())
    once = sum(p.numel() for own in weights for p in own)
    return t * t * reach // 2 + 8 * t * width**3 * len(row) <= 2 * entries * t * once
