"""Signed columns that began at several places, as no more than twice what a sample has numbers where they wait.

All that is left to do with columns `u_k` under way is linear in `H_n = sum_k s_kn u_kn u_kn^T`, over the entries of all
tensors where they wait, side by side. `H_n` of `D` entries is the sum of `2 D` signed columns (see `polarised`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from bpk.fields.arrived import Columns
from bpk.jacobians.second_order.bordered import nonzero, polarised
from bpk.plan.plan import Plan
from bpk.plan.step import Step

TOUCHED = 16
"""Multiplications that take as long as sending a number through a layer that does nothing but look at it."""


class Merging:
    """When columns should be merged, on one plan."""

    def __init__(self, plan: Plan, at_most: int | None) -> None:
        self.room = None if at_most is None else at_most * plan.largest
        work = torch.tensor([multiplications(step) if step.runs else 0.0 for step in plan.steps], dtype=torch.float64)
        self.to_come = work.flip(0).cumsum(0).flip(0).tolist()

    def pays(self, waiting: Mapping[Step, Columns], step: Step) -> bool:
        """Whether sending fewer columns through all calls from `step` on saves more than it costs to merge them."""
        counts = {key: len(mat) for columns in waiting.values() for key, mat in columns.blocks.items()}
        count, size = sum(counts.values()), entries(waiting)
        if not size or count <= 2 * size:
            return False
        rows = {mat.shape[1] for columns in waiting.values() for mat in columns.blocks.values()}
        kinds = {mat.dtype for columns in waiting.values() for mat in columns.blocks.values()}
        if len(rows) > 1 or len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
            return False
        if any(at.samples_of_rows is not None for at in waiting):
            return False
        if self.room is not None and size * size * rows.pop() > self.room:
            return False
        return (count - 2 * size) * self.to_come[step.number] > count * size * size


def entries(waiting: Mapping[Step, Columns]) -> int:
    """How many numbers a sample has where columns wait."""
    return sum(prod(first(columns).shape[2:]) for columns in waiting.values())


def first(columns: Columns) -> Tensor:
    """One of the blocks."""
    return next(iter(columns.blocks.values()))


def multiplications(step: Step) -> float:
    """About how many a column takes at a call, for a sample: matrices are multiplied once for each position."""
    size = step.call.output.numel() // max(1, step.batch_size)
    matrices = [p for p in step.call.params.values() if p.dim() > 1]
    return TOUCHED * size + sum(p.numel() * max(1, size // p.shape[0]) for p in matrices)


def merged(waiting: Mapping[Step, Columns]) -> tuple[list[Tensor], Tensor]:
    """The same sum of squares as fewer columns: `[K, N, *out]` at each call, and signs `[K, N]`."""
    shapes = [first(columns).shape[2:] for columns in waiting.values()]
    rows = dense(list(waiting.values()), [prod(shape) for shape in shapes]).div_(2)
    alive = nonzero(rows)
    columns, signs = polarised(rows if len(alive) == len(rows) else rows[alive], alive)
    parts = columns.split([prod(shape) for shape in shapes], 2)
    return [part.reshape(*signs.shape, *shape) for part, shape in zip(parts, shapes, strict=True)], signs


def dense(waiting: Sequence[Columns], sizes: Sequence[int]) -> Tensor:
    """`sum_k s_kn u_kn u_kn^T`, as rows `[D, N, D]`."""
    like = first(waiting[0])
    total = like.new_zeros(like.shape[1], sum(sizes), sum(sizes))
    corners = [sum(sizes[:k]) for k in range(len(sizes))]
    places = list(zip(waiting, corners, sizes, strict=True))
    for a, (left, row, height) in enumerate(places):
        for right, column, width in places[: a + 1]:
            block = total[:, row : row + height, column : column + width]
            for key, mat in left.blocks.items():
                if key not in right.blocks:
                    continue
                signs, other = left.signs[key], right.blocks[key].flatten(2).transpose(0, 1)
                weighted = mat.flatten(2) if signs is None else mat.flatten(2) * signs[..., None]
                block += torch.bmm(weighted.permute(1, 2, 0), other)
            if left is not right:
                total[:, column : column + width, row : row + height] = block.mT
    return total.transpose(0, 1)
