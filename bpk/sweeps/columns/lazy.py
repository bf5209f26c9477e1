"""Columns at the call where they begin, made a few at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.jacobians.second_order.factoring import signed_roots
from bpk.plan.samples.rows import slots, to_samples

Chunk = tuple[Mapping[Wrt, Tensor], Tensor | None]
"""Columns `[K, N, ...]` at inputs and parameters of a call, and signs `[K, N]` (`None`: all ones)."""


class StartingColumns(ABC):
    """`count` columns that begin at a call; `name` tells several of these from each other."""

    count: int
    name: Hashable

    @abstractmethod
    def chunks(self, size: int) -> Iterator[Chunk]:
        """All of them, at most `size` at a time."""


@dataclass
class LazyColumns(StartingColumns):
    """Columns of which `make(start, stop)` gives some. Those of one `unit` (so many) should be made together."""

    count: int
    make: Callable[[int, int], Chunk]
    name: Hashable = "residual"
    unit: int = 1

    def all(self) -> tuple[Mapping[Wrt, Tensor], Tensor]:
        """All of them at once."""
        mats, signs = self.make(0, self.count)
        return mats, next(iter(mats.values())).new_ones(()) if signs is None else signs

    def chunks(self, size: int) -> Iterator[Chunk]:
        size = max(size // self.unit * self.unit, min(size, self.unit))
        for start in range(0, self.count, size):
            yield self.make(start, min(start + size, self.count))

    def mapped(self, change: Callable[[Chunk], Chunk]) -> LazyColumns:
        """The same columns, changed one by one."""
        return replace(self, make=lambda start, stop: change(self.make(start, stop)))


def as_lazy(columns: Mapping[Wrt, Tensor], signs: Tensor | None, name: Hashable = "residual") -> LazyColumns:
    """Columns that exist already."""

    def make(start: int, stop: int) -> Chunk:
        some = signs if signs is None else signs[start:stop]
        return {wrt: mat[start:stop] for wrt, mat in columns.items()}, some

    return LazyColumns(len(next(iter(columns.values()))), make, name)


def diagonal(diag: Tensor) -> LazyColumns:
    """A diagonal `[N, *in]`, such as a residual: each column has one entry per sample."""
    flat = diag.flatten(1) if diag.dim() > 1 else diag[:, None]
    root, signs = signed_roots(flat)

    def make(start: int, stop: int) -> Chunk:
        here = torch.arange(start, stop, device=diag.device)
        columns = flat.new_zeros(stop - start, *flat.shape)
        columns[here - start, :, here] = root.T[start:stop]
        return {0: columns.reshape(len(columns), *diag.shape)}, signs.T[start:stop]

    return LazyColumns(flat.shape[1], make)


def split_rows(lazy: LazyColumns, samples: Tensor, n: int) -> LazyColumns:
    """Columns for each row of a sample: of `K` columns `[K, R, ...]` `K S`, with signs `[K S, N]`.

    `samples` `[R]` says which of the `n` samples a row belongs to. What belongs to a parameter comes by sample.
    """
    slot = slots(samples)
    count = int(slot.max()) + 1

    def make(start: int, stop: int) -> Chunk:
        here = torch.arange(start, stop, device=slot.device)
        column, place = here // count, here % count
        first, last = start // count, (stop - 1) // count + 1
        mats, signs = lazy.make(first, last)
        mask = slot == place[:, None]  # [K, R]

        def at_rows(rows: Tensor) -> Tensor:
            chosen = rows[column - first]
            return chosen * mask.reshape(*mask.shape, *[1] * (rows.dim() - 2)).to(rows.dtype)

        def by_sample(rows: Tensor) -> Tensor:
            if n == 1:  # each column has one row
                return rows[column - first, place][:, None]
            return to_samples(at_rows(rows), samples, n)

        parts = {wrt: at_rows(mat) if isinstance(wrt, int) else by_sample(mat) for wrt, mat in mats.items()}
        return parts, signs if signs is None else by_sample(signs)

    return LazyColumns(lazy.count * count, make, lazy.name)
