"""Signed columns that began at several places, as no more than twice what a sample has numbers where they wait.

All that is left to do with columns `u_k` under way is linear in `H_n = sum_k s_kn u_kn u_kn^T`, over the entries of all
tensors where they wait, side by side: outputs of calls, and parameters that calls further up use as well. Entries that
are the same in all columns, as on the ways around the layers of a residual network, count once. `H_n` of `D` entries is
the sum of `2 D` signed columns (see `polarised`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from bpk.fields.arrived import Columns, Use
from bpk.fields.statistics import Uses
from bpk.jacobians.second_order.bordered import nonzero, polarised
from bpk.plan.plan import Plan
from bpk.plan.step import Step
from bpk.sweeps.columns.diagonals import EXACT

MULTIPLIED, TOUCHED = 4, 64
"""How many multiplications of a merge take as long as one by a weight of a layer, and as one number that a layer reads.

A merge is one large matrix product; columns that pass a layer are read and written several times, and squared.
"""


@dataclass
class Deposit:
    """`sum_k s_k u_k u_k^T` `[N, E, E]` of columns over entries of some places, of these `shapes`, side by side.

    Entries that are the same in all columns count once: `first` `[E]` are one of each, `same_as` `[D]` tells which.
    """

    shapes: tuple[torch.Size, ...]
    first: Tensor
    same_as: Tensor
    matrix: Tensor

    def refined(self, same_as: Tensor) -> Deposit:
        """The same sum, where only entries count once that are the same in other columns as well."""
        both, joint = torch.stack([self.same_as, same_as]).unique(dim=1, return_inverse=True)
        if both.shape[1] == len(self.first):
            return self
        every = torch.arange(len(joint), device=joint.device)
        first = torch.full_like(both[0], len(joint)).scatter_reduce_(0, joint, every, "amin")
        matrix = self.matrix[:, both[0][:, None], both[0]]
        return Deposit(self.shapes, first, joint, matrix)

    def columns(self, size: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Columns `[K, N, *place]` with the same sum, about so many at a time, and signs `[K, N]`."""
        rows = self.matrix.transpose(0, 1)
        sizes = [shape.numel() for shape in self.shapes]
        for alive in nonzero(rows).split(max(1, size // 2)):
            mats, signs = polarised(rows[alive] / 2, alive)
            parts = [mats[..., part] for part in self.same_as.split(sizes)]
            yield [x.reshape(*x.shape[:2], *shape) for x, shape in zip(parts, self.shapes, strict=True)], signs


class Merging:
    """When columns should be merged, on one plan."""

    def __init__(self, plan: Plan, at_most: int | None) -> None:
        self.room = None if at_most is None else at_most * plan.largest
        self.plan = plan

    @cached_property
    def to_come(self) -> list[float]:
        """What it takes to send a column of one sample through all calls from each step on."""
        work = [multiplications(step) if step.runs else 0.0 for step in reversed(self.plan.steps)]
        return list(accumulate(work))[::-1]

    def pays(self, count: int, size: int, n: int, step: Step) -> bool:
        """Whether sending `2 size` columns through all calls from `step` on, not `count`, saves more than it costs."""
        if not (self.saves(count, size) and self.fits(size, n)):
            return False
        return (count - 2 * size) * self.to_come[step.number] > count * size * (size + TOUCHED)

    @staticmethod
    def saves(count: int, size: int) -> bool:
        """Whether `2 size` columns are so many less; where it is less than a third, a place with fewer entries often
        comes next."""
        return 3 * (count - 2 * size) >= count

    def fits(self, size: int, n: int) -> bool:
        """Whether memory holds matrices over so many entries."""
        return size > 0 and (self.room is None or size * size * n <= self.room)

    def is_worth(self, count: int, size: int, n: int, step: Step) -> bool:
        """Whether `count` columns, not all of which are under way, should be added up over `size` entries."""
        return self.fits(size, n) and count >= 2 * size and self.to_come[step.number] > size * (size + TOUCHED)

    @staticmethod
    def like(waiting: Mapping[Step, Columns]) -> Tensor | None:
        """One of the blocks, where all have the same samples, and sums of their squares can be formed."""
        blocks = [mat for waits in waiting.values() for mat in waits.blocks.values()]
        if not blocks or any(at.samples_of_rows is not None or not waits.blocks for at, waits in waiting.items()):
            return None
        like = blocks[0]
        alike = all(mat.shape[1] == like.shape[1] and mat.dtype is like.dtype for mat in blocks)
        return like if alike and like.dtype in EXACT else None

    def merge(self, waiting: Mapping[Step, Columns], uses: Mapping[int, list[Use]], step: Step) -> Deposit | None:
        """Fewer columns before `step`, where that pays: asked with what may be left of the entries, the least first."""
        sizes = {key: len(mat) for waits in waiting.values() for key, mat in waits.blocks.items()}
        largest = max([width(waits) for waits in waiting.values() if waits.blocks], default=0)
        count = sum(sizes.values())
        if not self.saves(count, largest) or (like := self.like(waiting)) is None:
            return None
        n = like.shape[1]
        shared = sum([mine[0].call.params[mine[0].name].numel() for mine in uses.values()])
        if not self.pays(count, max(shared, largest), n, step):
            return None
        if uses and not self.pays(count, max(shared, len(distinct([*waiting.values()])[0])), n, step):
            return None  # what has come to parameters takes time to find
        places = [*waiting.values(), *(pulled(mine, n) for mine in uses.values())]
        mats = [mat for waits in places for mat in waits.blocks.values()]
        if any(mat.shape[1] != n or mat.dtype is not like.dtype for mat in mats):
            return None
        first, same_as = distinct(places)
        return added_up(places, first, same_as) if self.pays(count, len(first), n, step) else None


def multiplications(step: Step) -> float:
    """What it takes to send a column of one sample through a call: its matrices are used once for each position."""
    call, n = step.call, max(1, step.batch_size)
    size, read = call.output.numel() // n, sum(x.numel() for x in call.inputs) // n
    matrices = [p for p in call.params.values() if p.dim() > 1]
    used = sum(p.numel() * max(1, size // p.shape[0], read // p[0].numel()) for p in matrices if p.numel())
    return TOUCHED * (size + read) + MULTIPLIED * used


def pulled(uses: list[Use], n: int) -> Columns:
    """The columns `[V, N, *p]` of a parameter that waits for other uses."""
    found, rows = Columns(), Uses(uses[0].call.params[uses[0].name], n, uses)
    for key in rows.keys:
        found.add(key, rows.rows(key), rows.signs[key])
    return found


def width(columns: Columns) -> int:
    """How many numbers a sample has where columns wait."""
    return next(iter(columns.blocks.values())).shape[2:].numel()


def flat(mat: Tensor) -> Tensor:
    """`[K, N, *out]` as `[K, N, D]`, also where a sample is one number."""
    return mat.reshape(*mat.shape[:2], mat.shape[2:].numel())


def blocks_of(places: Sequence[Columns]) -> dict[Hashable, tuple[Tensor, Tensor | None]]:
    """By where columns began: one of their blocks, and their signs."""
    return {key: (mat, columns.signs[key]) for columns in places for key, mat in columns.blocks.items()}


def distinct(places: Sequence[Columns]) -> tuple[Tensor, Tensor]:
    """Entries side by side that seem to be the same in all columns: one of each `[E]`, and which `[D]` of these."""
    marks = []
    for columns in places:
        mark = next(iter(columns.blocks.values())).new_zeros(width(columns))
        for number, key in enumerate(blocks_of(places)):
            if key in columns.blocks:
                rows = flat(columns.blocks[key]).flatten(0, 1)
                weights = torch.arange(len(rows), dtype=torch.float64, device=mark.device)
                mark += (weights + 1 + 0.1 * number).sin().to(mark.dtype) @ rows
        marks.append(mark)
    found, same_as = torch.cat(marks).unique(return_inverse=True)
    every = torch.arange(len(same_as), device=found.device)
    first = torch.full_like(found, len(every), dtype=torch.long).scatter_reduce_(0, same_as, every, "amin")
    return first, same_as


def joint_columns(places: Sequence[Columns], entries: Tensor) -> tuple[Tensor, Tensor]:
    """All columns over some entries of all places, `[K, N, E]`, zero where they do not go, and their signs `[K, N]`."""
    known = blocks_of(places)
    sizes, like = [len(mat) for mat, _ in known.values()], next(iter(known.values()))[0]
    joint = like.new_zeros(sum(sizes), like.shape[1], len(entries))
    signs = torch.cat([like.new_ones(mat.shape[:2]) if some is None else some for mat, some in known.values()])
    start = 0
    for columns in places:
        here = ((entries >= start) & (entries < start + width(columns))).nonzero()[:, 0]
        for key, rows in zip(known, joint.split(sizes), strict=True):
            if key in columns.blocks and len(here):
                rows[..., here] = flat(columns.blocks[key])[..., entries[here] - start]
        start += width(columns)
    return joint, signs


def are_same(places: Sequence[Columns], joint: Tensor, same_as: Tensor) -> bool:
    """Whether all columns are what their `distinct` entries say."""
    parts = same_as.split([width(columns) for columns in places])
    start = 0
    for key, (mat, _) in blocks_of(places).items():
        rows = joint[start : start + len(mat)]
        for columns, part in zip(places, parts, strict=True):
            seen = rows[..., part]
            if not (torch.equal(flat(columns.blocks[key]), seen) if key in columns.blocks else not seen.any()):
                return False
        start += len(mat)
    return True


def added_up(places: Sequence[Columns], first: Tensor, same_as: Tensor) -> Deposit | None:
    """The sum over distinct entries (`None`: others are not the same as these)."""
    joint, signs = joint_columns(places, first)
    if len(first) < len(same_as) and not are_same(places, joint, same_as):
        return None
    matrix = torch.bmm((joint * signs[..., None]).permute(1, 2, 0), joint.transpose(0, 1))
    shapes = tuple([next(iter(columns.blocks.values())).shape[2:] for columns in places])
    return Deposit(shapes, first, same_as, matrix)
