"""Columns that are ahead of the sweep wait where a sample has few numbers, added up as matrices.

Where memory holds no more columns, those under way go ahead. All that is left to do with them is linear in the sum of
their squares (see `merging.py`), so that they need not go to the end, those that start later the same way again: at a
place of few entries they are added up, whatever their number, and the sum goes on as columns when the sweep is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.fields.arrived import Columns, Use
from bpk.jacobians.second_order.bordered import nonzero, polarised
from bpk.plan.step import Step
from bpk.sweeps.columns.merging import Merging, distinct, sums, width


@dataclass
class Deposit:
    """`sum_k s_k u_k u_k^T` `[N, E, E]` of columns over entries of some places side by side.

    Entries that are the same in all columns count once: `first` `[E]` are one of each, `same_as` `[D]` tells which.
    """

    places: tuple[Step, ...]
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
        return Deposit(self.places, self.shapes, first, joint, matrix)

    def columns(self, size: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Columns `[K, N, *place]` with the same sum, about so many at a time, and signs `[K, N]`."""
        rows = self.matrix.transpose(0, 1)
        sizes = [shape.numel() for shape in self.shapes]
        for alive in nonzero(rows).split(max(1, size // 2)):
            mats, signs = polarised(rows[alive] / 2, alive)
            parts = [mats[..., part] for part in self.same_as.split(sizes)]
            yield [x.reshape(*x.shape[:2], *shape) for x, shape in zip(parts, self.shapes, strict=True)], signs


class Deposits:
    """What waits before steps that the sweep has not come to."""

    def __init__(self, merging: Merging) -> None:
        self.merging = merging
        self.before: dict[Step, dict[tuple[Step, ...], Deposit]] = {}

    def take(self, waiting: Mapping[Step, Columns], uses: Mapping[int, list[Use]], step: Step, count: int) -> bool:
        """Add up the columns that wait before `step`, where others have been, or if that is worth it for `count`.

        Not those that have come to parameters which wait for other uses.
        """
        like = self.merging.like(waiting)
        if like is None or uses:
            return False
        places = tuple(sorted(waiting, key=lambda at: at.number))
        columns, n = [waiting[at] for at in places], like.shape[1]
        known = self.before.get(step, {}).get(places)
        if known is None and not self.merging.is_worth(count, max(map(width, columns)), n, step):
            return False
        first, same_as = distinct(columns)
        if known is not None:
            known = known.refined(same_as)
            first, same_as = known.first, known.same_as
        if not (
            self.merging.is_worth(count, len(first), n, step) if known is None else self.merging.fits(len(first), n)
        ):
            return False
        matrix = sums(columns, first, same_as)
        if matrix is None:
            return False
        shapes = tuple([next(iter(waits.blocks.values())).shape[2:] for waits in columns])
        matrix = matrix if known is None else known.matrix + matrix
        self.before.setdefault(step, {})[places] = Deposit(places, shapes, first, same_as, matrix)
        return True

    def withdraw(self, step: Step, size: int) -> Iterator[tuple[tuple[Step, ...], list[Tensor], Tensor, int]]:
        """What waits before a step, so many columns at a time: places, columns for each, signs, how many are left."""
        for places, deposit in self.before.pop(step, {}).items():
            left = 2 * len(deposit.first)
            for mats, signs in deposit.columns(size):
                yield places, mats, signs, left
                left -= len(signs)
