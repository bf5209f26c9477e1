"""Columns that are ahead of the sweep wait where a sample has few numbers, added up as matrices.

Where memory holds no more columns, those under way go ahead. All that is left to do with them is linear in the sum of
their squares (see `merging.py`), so that they need not go to the end, those that start later the same way again: at a
place of few entries they are added up, whatever their number, and the sum goes on as columns when the sweep is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from bpk.fields.arrived import Columns, Use
from bpk.plan.step import Step
from bpk.sweeps.columns.merging import Deposit, Merging, added_up, distinct, width


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
        found = added_up(columns, first, same_as)
        if found is None:
            return False
        if known is not None:
            found.matrix += known.matrix
        self.before.setdefault(step, {})[places] = found
        return True

    def withdraw(self, step: Step, size: int) -> Iterator[tuple[tuple[Step, ...], list[Tensor], Tensor, int]]:
        """What waits before a step, so many columns at a time: places, columns for each, signs, how many are left."""
        for places, deposit in self.before.pop(step, {}).items():
            left = 2 * len(deposit.first)
            for mats, signs in deposit.columns(size):
                yield places, mats, signs, left
                left -= len(signs)
