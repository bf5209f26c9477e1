"""Signed columns of symmetric matrices that can only be multiplied with, by as few products as structure allows.

Entries that are not coupled, directly or through others, lie in blocks of their own (heads of attention). A product
with a random column over some of the entries shows which ones these are coupled with, and one column serves an entry of
every block. Functions that are linear in each of two parts leave a *corner* of the matrix zero: the rows of the smaller
part are all that there is (a gate, and what it scales). What few rows say, `polarised` makes columns of; so it does for
blocks that are large, whose eigendecomposition would take longer than what it saves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.second_order.bordered import polarised
from bpk.jacobians.second_order.factoring import factor
from bpk.jacobians.second_order.probing import draw, tolerance
from bpk.jacobians.second_order.structure import AT_ONCE, components

Multiply = Callable[[Tensor], Tensor]
"""Multiplies columns `[V, N, D]` with the matrices `[N, D, D]`."""

SMALL = 8
"""Up to how many rows a block is decomposed without a look at its structure."""

FEW = 32
"""Up to how many rows of a block are found one by one, without a look at what they are coupled with."""

SHARE = 8
"""So many times fewer products than the rows of a block go into the search for smaller ones."""

LARGE = 96
"""Up to how many rows a block is decomposed."""


class Signed(ABC):
    """Signed columns of blocks `[Q, S]` of the `total` entries of a sample, made a few at a time.

    So many in a row as a `unit` says come from the same products.
    """

    at: Tensor
    total: int
    count: int
    unit: int = 1

    @abstractmethod
    def of_blocks(self, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the columns with these numbers: the block `[K]` of each, its entries `[K, N, S]`, its signs `[K, N]`."""

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Some of them, over all entries of a sample, `[K, N, D]`, and their signs `[K, N]`."""
        block, values, signs = self.of_blocks(torch.arange(start, stop, device=self.at.device))
        spread = values.new_zeros(*values.shape[:2], self.total)
        return spread.scatter_(2, self.at[block][:, None].expand_as(values), values), signs


class Eigenvectors(Signed):
    """Those of dense blocks `[N, Q, S, S]`."""

    def __init__(self, at: Tensor, dense: Tensor, total: int) -> None:
        n, blocks = dense.shape[:2]
        vectors, signs = factor(dense.flatten(0, 1), balanced=True)
        self.vectors, self.signs = vectors.unflatten(1, (n, blocks)), signs.unflatten(1, (n, blocks))
        self.at, self.total, self.count = at, total, len(vectors) * blocks

    def of_blocks(self, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number, block = here // len(self.at), here % len(self.at)
        return block, self.vectors[number, :, block], self.signs[number, :, block]


class Pairs(Signed):
    """Two for each of some entries of every block, of its row: nothing is decomposed, nor kept.

    Args:
        at: The entries of each block; the first `kept` ones are the corner.
        rows: Gives the rows `[V, N, Q, S]` of some of these, by their numbers.
        used: The numbers of those whose rows are not zero.
        kept: How many entries of a block are the corner.
        total: How many entries a sample has.
    """

    def __init__(self, at: Tensor, rows: Callable[[Tensor], Tensor], used: Tensor, kept: int, total: int) -> None:
        self.at, self.total, self.rows, self.used, self.kept = at, total, rows, used, kept
        self.unit = 2 * len(at)
        self.count = self.unit * len(used)

    def of_blocks(self, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number, block, side = here // self.unit, here % self.unit // 2, here % 2
        first = int(number[0])
        some = self.used[first : int(number[-1]) + 1]
        rows = self.rows(some)
        rows[..., : self.kept] /= 2
        vectors, signs = polarised(rows.flatten(1, 2), some)
        each = 2 * (number - first) + side
        shape = rows.shape[1:3]
        return block, vectors.unflatten(1, shape)[each, :, block], signs.unflatten(1, shape)[each, :, block]


@dataclass
class BlockDiagonal:
    """Matrices that are block-diagonal in a known way: `at` `[P, B]` are the entries of each block, in all `D`.

    Args:
        multiply: Multiplies with them.
        at: The entries of each block.
        part: Which part (tensor) an entry of a block `[B]` belongs to.
        like: A tensor `[N, ...]` of the right precision and device.
    """

    multiply: Multiply
    at: Tensor
    part: Tensor
    like: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        """The same numbers `[V, B]` in each block, of each sample: `[V, N, D]`."""
        columns = rows.new_zeros(len(rows), self.at.numel())
        columns.scatter_(1, self.at.flatten().expand(len(rows), -1), rows.repeat(1, len(self.at)))
        return columns[:, None].expand(-1, len(self.like), -1)

    def coupled(self, chosen: Tensor, seed: int) -> Tensor:
        """Which entries `[B]` of a block are coupled with the `chosen` ones `[B]`, in any block of any sample."""
        column = draw((1, len(chosen)), self.like, seed) * chosen
        return (self.multiply(self.spread(column))[0, :, self.at] != 0).flatten(0, 1).any(0)

    # ---- structure ------------------------------------------------------------------------------------
    def corner(self) -> Tensor:
        """The entries `[B]` of those parts without which the rest of a block is zero: large parts are left out first.

        All of them, where those are more than half of a block.
        """
        members = [self.part == k for k in range(int(self.part.max()) + 1)]
        corner = torch.ones_like(self.part, dtype=torch.bool)
        for mine in sorted(members, key=lambda mine: -int(mine.sum())) if members[1:] else ():
            if not bool((self.coupled(mine, 0) & (mine | ~corner)).any()):
                corner &= ~mine
        return corner if 2 * int(corner.sum()) <= len(corner) else torch.ones_like(corner)

    def groups(self, most: int) -> list[Tensor]:
        """Entries `[C, S]` of the smaller blocks inside a block, those of each size together, from so many products."""
        size = len(self.part)
        whole = [torch.arange(size, device=self.at.device)[None]]
        free = torch.ones_like(self.part, dtype=torch.bool)
        found: dict[int, list[Tensor]] = {}
        asked = 0
        while bool(free.any()):
            mine = torch.zeros_like(free)
            mine[int(free.nonzero()[0])] = True
            while True:
                if asked == most:
                    return whole
                asked += 1
                seen = mine | self.coupled(mine, asked)
                if torch.equal(seen, mine):
                    break
                mine = seen
            if not bool(free[mine].all()):
                return whole
            free &= ~mine
            entries = mine.nonzero()[:, 0]
            if not found and asked * size > most * len(entries):  # the others will not be much larger
                return whole
            found.setdefault(len(entries), []).append(entries)
        return [torch.stack(alike) for alike in found.values()]

    # ---- columns --------------------------------------------------------------------------------------
    def columns(self) -> list[Signed]:
        """All of them."""
        whole = torch.ones_like(self.part, dtype=torch.bool)
        group = torch.arange(len(whole), device=whole.device)[None]
        if tolerance(self.like) < 0 or len(whole) <= SMALL:
            return [Eigenvectors(*self.dense(group), self.at.numel())]
        corner = self.corner()
        count = int(corner.sum())
        inside = self.groups(count // SHARE) if count > FEW else [group]
        used = self.coupled(whole, 0)
        parts = [part for group in inside for part in corner_first(group, corner)]
        return [signed for some, kept in parts for signed in self.of_group(some, kept, used)]

    def of_group(self, group: Tensor, kept: int, used: Tensor) -> list[Signed]:
        """Those of blocks `[C, S]` of which the first entries are the corner."""
        size, total = group.shape[1], self.at.numel()
        if kept == size and (size <= LARGE or size * total * len(self.like) <= AT_ONCE):
            at, dense = self.dense(group)
            joined = (dense != 0).flatten(0, 1).any(0)
            whole = torch.arange(size, device=at.device)[None]
            inside = components(joined) if size > LARGE else [whole]
            coupled = [entries[joined[entries].flatten(1).any(1)] for entries in inside]
            return [of_dense(at, dense, entries, total) for entries in coupled if len(entries)]
        numbers = used[group[:, :kept]].any(0).nonzero()[:, 0]
        return [Pairs(self.at[:, group].flatten(0, 1), partial(self.rows, group), numbers, kept, total)]

    def dense(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """The entries `[Q, S]` of all blocks of a group, and the blocks themselves `[N, Q, S, S]`."""
        numbers = torch.arange(group.shape[1], device=group.device)
        at_once = max(1, AT_ONCE // (self.at.numel() * len(self.like)))
        rows = torch.cat([self.rows(group, some) for some in numbers.split(at_once)])
        return self.at[:, group].flatten(0, 1), rows.permute(1, 2, 0, 3)

    def rows(self, group: Tensor, some: Tensor) -> Tensor:
        """Some rows of all blocks `[C, S]` of a group, by their numbers inside of a block: `[V, N, P C, S]`."""
        entries = group[:, some]
        units = self.like.new_zeros(len(some), len(self.part)).scatter_(1, entries.T, 1.0)
        return self.multiply(self.spread(units))[:, :, self.at[:, group].flatten(0, 1)]


def of_dense(at: Tensor, dense: Tensor, inside: Tensor, total: int) -> Signed:
    """Those of the blocks `[C, S]` that are inside of known ones `[N, Q, B, B]`, over the entries `at` `[Q, B]`."""
    blocks = dense[:, :, inside[:, :, None], inside[:, None]].flatten(1, 2)
    entries = at[:, inside].flatten(0, 1)
    if inside.shape[1] <= LARGE:
        return Eigenvectors(entries, blocks, total)
    rows = blocks.permute(2, 0, 1, 3)
    return Pairs(entries, lambda some: rows[some], torch.arange(len(rows), device=at.device), len(rows), total)


def corner_first(group: Tensor, corner: Tensor) -> list[tuple[Tensor, int]]:
    """Blocks `[C, S]` with those entries first that belong to a corner `[B]`; those that have as many together."""
    inside = corner[group]
    counts = inside.sum(1)
    order = inside.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    ordered = group.gather(1, order)
    return [(ordered[counts == kept], int(kept)) for kept in counts.unique() if kept]


def numbered(parts: Sequence[int]) -> Tensor:
    """The number of the part of each entry, where parts have so many in a block."""
    return torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
