"""Signed columns at the place where they begin, made a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.call import Wrt

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
