"""Columns that are sums of those of a square root: of `J^T sum_v w_kv s_v` there are `K`, however many `V` are."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from bpk.plan.step import Step
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, StartingColumns
from bpk.sweeps.starts.square_root import SquareRoot


def columns_at(key: Hashable) -> slice:
    """Which of the `K` columns have begun at a place."""
    assert isinstance(key, tuple) and isinstance(key[0], range), "columns of a weighted root"
    return slice(key[0].start, key[0].stop)


class WeightedRoot(SquareRoot):
    """`sum_v w_kv s_v`, for weights `[K, V, N]` of the columns of all losses, in the order in which these are reached.

    The key of a block says which of the `K` columns it has: `range(start, stop)`.
    """

    before = 0

    def __init__(self, weights: Tensor, mc_samples: int | None = None) -> None:
        super().__init__(mc_samples)
        self.weights = weights

    @property
    def key(self) -> Hashable:
        return ("weighted root", self.mc_samples, id(self.weights))

    def starting(self, step: Step) -> list[StartingColumns]:
        sums: dict[int | str, Tensor] = {}
        for lazy in super().starting(step):
            for mats, _ in lazy.chunks(self.chunk):
                here = self.weights[:, self.before : self.before + len(next(iter(mats.values())))]
                self.before += here.shape[1]
                for wrt, mat in mats.items():
                    rows = step.samples_of_rows if isinstance(wrt, int) else None
                    weights = here if rows is None else here[:, :, rows]
                    part = torch.einsum("kvn,vn...->kn...", weights.to(mat.dtype), mat)
                    sums[wrt] = sums[wrt] + part if wrt in sums else part
        size, count = self.chunk, len(self.weights) if sums else 0
        return [self.some(sums, range(k, min(k + size, count))) for k in range(0, count, size)]

    def some(self, sums: dict[int | str, Tensor], part: range) -> LazyColumns:
        """Some of the columns."""

        def make(start: int, stop: int) -> Chunk:
            return {wrt: mat[part.start + start : part.start + stop] for wrt, mat in sums.items()}, None

        return LazyColumns(len(part), make, part)
