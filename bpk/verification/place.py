"""Where to look: entries of a parameter, samples, and a direction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Extent:
    """How large a problem is: numbers per sample of the prediction, and of the largest output of a layer."""

    columns: int
    widest: int


@dataclass(frozen=True)
class Place:
    """What of one parameter is compared.

    `entries` are flat indices, `chosen` the samples that an extension considers, in its order, and `looked` those of
    them (positions) at which quantities of single samples are compared. `vector` is multiplied with matrices. `count`
    and `seed` make further choices of entries, of which `rows` are rows of a matrix.
    """

    name: str
    shape: torch.Size
    entries: Tensor
    vector: Tensor
    n: int
    chosen: tuple[int, ...]
    looked: tuple[int, ...]
    count: int
    seed: int
    rows: Tensor | None = None

    @classmethod
    def of(cls, name: str, gradient: Tensor, n: int, count: int, samples: int, seed: int) -> Place:
        """Random entries, samples and direction, the same for the same seed.

        Where the gradient is zero at some of the entries (tokens that do not occur), half of them are others.
        """
        where = torch.Generator().manual_seed(seed)
        looked = torch.randperm(n, generator=where, device="cpu")[:samples].sort().values
        vector = torch.randn(gradient.shape, generator=where, dtype=torch.float64, device="cpu").to(gradient)
        entries = pick_live(gradient.flatten(), count, seed)
        rows = pick_live(gradient.abs().sum(1), count, seed) if gradient.dim() == 2 else None
        return cls(name, gradient.shape, entries, vector, n, tuple(range(n)), tuple(looked.tolist()), count, seed, rows)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The samples at which quantities of single samples are compared, by their number in the batch."""
        return tuple(self.chosen[k] for k in self.looked)

    def index(self, k: int) -> list[int]:
        """The index `[...]` of the `k`-th of the chosen entries."""
        return unravel(int(self.entries[k]), self.shape)

    def side(self, size: int) -> Tensor:
        """Entries of one side of a Kronecker factor."""
        if self.rows is not None and size == self.shape[0]:
            return self.rows
        return pick(size, self.count, self.seed)

    def restricted(self, subsampling: list[int] | None) -> Place:
        """For an extension that considers some samples only."""
        if subsampling is None:
            return self
        where = torch.Generator().manual_seed(self.seed)
        looked = torch.randperm(len(subsampling), generator=where, device="cpu")[: len(self.looked)].sort().values
        return replace(self, chosen=tuple(subsampling), looked=tuple(looked.tolist()))


def pick(size: int, count: int, seed: int) -> Tensor:
    """Random numbers below `size` without repetition, in order; the same for the same seed."""
    where = torch.Generator().manual_seed(seed + size)
    if size <= 100_000:
        return torch.randperm(size, generator=where, device="cpu")[:count].sort().values
    return torch.randint(size, (count,), generator=where, device="cpu").unique()


def pick_live(gradient: Tensor, count: int, seed: int) -> Tensor:
    """Random entries of a vector; where it is zero at some of them, half of them are entries where it is not."""
    anywhere = pick(len(gradient), count, seed).to(gradient.device)
    live = gradient.nonzero()[:, 0]
    if len(live) == 0 or bool((gradient[anywhere] != 0).all()):
        return anywhere
    some = live[pick(len(live), count, seed).to(live.device)]
    mixed = dict.fromkeys([*some[: (count + 1) // 2].tolist(), *anywhere.tolist()])
    return torch.tensor(list(mixed)[:count], device=gradient.device)


def unravel(flat: int, shape: torch.Size) -> list[int]:
    """The index of an entry by its flat index."""
    return [int(k) for k in torch.unravel_index(torch.tensor(flat), shape)] if shape else []
