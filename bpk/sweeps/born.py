"""Signed columns at the place where they begin, made a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.plan.samples import slots, to_samples

Chunk = tuple[Mapping[Wrt, Tensor], Tensor]
"""Columns `[K, N, ...]` by what they belong to, and signs `[K, N]`."""


@dataclass(frozen=True)
class Born:
    """`count` signed columns; `make(start, stop)` gives some of them."""

    count: int
    make: Callable[[int, int], Chunk]

    def all(self) -> Chunk:
        """All of them at once."""
        return self.make(0, self.count)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """All of them, at most `size` at a time."""
        for start in range(0, self.count, size):
            yield self.make(start, min(start + size, self.count))


def known(columns: Mapping[Wrt, Tensor], signs: Tensor) -> Born:
    """Columns that exist already."""

    def make(start: int, stop: int) -> Chunk:
        return {wrt: mat[start:stop] for wrt, mat in columns.items()}, signs[start:stop]

    return Born(len(signs), make)


def diagonal(diag: Tensor) -> Born:
    """A diagonal residual `[N, *in]`: each column has one entry per sample."""
    flat = diag.reshape(len(diag), -1)
    root, signs = flat.abs().sqrt(), flat.sign().T

    def make(start: int, stop: int) -> Chunk:
        here = torch.arange(start, stop, device=diag.device)
        columns = flat.new_zeros(stop - start, *flat.shape)
        columns[here - start, :, here] = root.T[start:stop]
        return {0: columns.reshape(-1, *diag.shape)}, signs[start:stop]

    return Born(flat.shape[1], make)


def split_rows(born: Born, samples: Tensor, n: int) -> Born:
    """Columns of their own for each row of a sample: of `K` columns `[K, R, ...]` `K S`, with signs `[K S, N]`.

    `samples` `[R]` says which of the `n` samples a row belongs to. What belongs to a parameter comes by sample.
    """
    slot = slots(samples)
    count = int(slot.max()) + 1

    def make(start: int, stop: int) -> Chunk:
        here = torch.arange(start, stop, device=slot.device)
        column, place = here // count, here % count
        first, last = start // count, (stop - 1) // count + 1
        mats, signs = born.make(first, last)
        mask = slot == place[:, None]  # [K, R]

        def apart(rows: Tensor) -> Tensor:
            chosen = rows[column - first]
            return chosen * mask.reshape(*mask.shape, *[1] * (rows.dim() - 2)).to(rows.dtype)

        def by_sample(rows: Tensor) -> Tensor:
            if n == 1:  # each column has one row
                return rows[column - first, place][:, None]
            return to_samples(apart(rows), samples, n)

        parts = {wrt: apart(mat) if isinstance(wrt, int) else by_sample(mat) for wrt, mat in mats.items()}
        return parts, by_sample(signs)

    return Born(born.count * count, make)
