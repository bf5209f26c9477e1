"""Inner products of rows with directions of which some indices of the parameter's first axis are there at a time.

Rows that are outer products are built for these indices alone: in the end, each number of a row was built once, and
each number of a direction read once for many samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bpk.fields.products import Products
from bpk.jacobians.core import outer
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import concatenated
from bpk.utils.projections import Block


def along_blocks(uses: Products, blocks: Iterable[Block]) -> Tensor:
    """`<rows_vn, d_k>` `[V, n, K]`, for directions `d` `[K, *p]` that come in blocks."""
    placed: Sequence[Placed] | None = None
    found = list[Tensor]()
    for some, directions in blocks:
        if directions[0].numel() == uses.param.numel():
            return uses.along(directions)
        placed = all_placed(uses) if placed is None else placed
        flat = wide(directions).flatten(1)
        found += [outer.along(piece, here) for part in placed for piece, here in part.pieces(some, flat)]
        if not placed:
            rest = uses.param[0].numel()
            at = slice(some.start * rest, some.stop * rest)
            lines = [outer.times(rows[..., at].transpose(0, 1), flat.T) for rows in uses.pieces()]
            found.append(concatenated(lines, 0).transpose(0, 1))
        found = [add_up(found)]
    return found[0]


def all_placed(uses: Products) -> Sequence[Placed]:
    """Rows as outer products with known places; nothing where they are none, or some places are not known."""
    placed = [Placed.of(part, uses.param) for part in uses.outers]
    known = [part for part in placed if part is not None]
    return known if len(known) == len(placed) else ()


@dataclass(frozen=True)
class Placed:
    """Outer products, of which each channel (or each entry of patches) belongs to one index of the first axis.

    `index` says to which, and `inner` `[G O, I]` at which of the `rest` entries there the numbers of rows are.
    """

    part: Outer
    of_patches: bool
    index: Tensor
    inner: Tensor
    rest: int

    @classmethod
    def of(cls, part: Outer, param: Tensor) -> Placed | None:
        """`None`: neither does."""
        numbers = torch.arange(param.numel(), dtype=torch.int32, device=param.device).view(param.shape)
        rest, places = param[0].numel(), part.matrix(numbers).flatten(-3, -2)
        index, inner = places // rest, places % rest
        if torch.equal(index, index[:, :1].expand_as(index)):
            return cls(part, False, index[:, 0], inner, rest)
        if part.shape[2] == 1 and torch.equal(index, index[:1].expand_as(index)):
            return cls(part, True, index[0], inner, rest)
        return None

    def pieces(self, some: slice, flat: Tensor) -> Iterator[tuple[Outer, Tensor]]:
        """The rows for some indices, as outer products of their own, and directions `[K, ...]` in their order."""
        chosen = ((self.index >= some.start) & (self.index < some.stop)).nonzero()[:, 0]
        start = (self.index[chosen] - some.start) * self.rest
        if self.of_patches:
            entries, here = as_slice(chosen), flat[:, start + self.inner[:, chosen]]
            yield self.narrowed(slice(None), slice(None), entries, len(chosen)), here
            return
        channels = self.part.shape[3]
        for g in range(self.part.shape[2]):
            ours = (chosen >= g * channels) & (chosen < (g + 1) * channels)
            if not bool(ours.any()):
                continue
            own, places = chosen[ours], start[ours, None] + self.inner[chosen[ours]]
            here = flat[:, : places.numel()].view(len(flat), *places.shape) if in_order(places) else flat[:, places]
            yield self.narrowed(slice(g, g + 1), as_slice(own - g * channels), slice(None), self.part.width), here

    def narrowed(self, groups: slice, channels: outer.Some, entries: outer.Some, width: int) -> Outer:
        """The rows of one group, for some channels and some entries of patches."""
        part = self.part
        return replace(
            part,
            columns=part.columns[:, :, groups, channels],
            patches=lambda samples: part.patches(samples)[:, groups, entries],
            width=width,
            matrix=lambda directions: directions.unsqueeze(-3),
        )


def as_slice(numbers: Tensor) -> outer.Some:
    """Numbers as a slice, which copies nothing, if they follow each other."""
    first, last = (int(x) for x in numbers[[0, -1]]) if len(numbers) else (0, -1)
    return slice(first, last + 1) if last + 1 - first == len(numbers) and bool((numbers.diff() == 1).all()) else numbers


def in_order(places: Tensor) -> bool:
    """Whether these are the first numbers, in their order."""
    return torch.equal(places.flatten(), torch.arange(places.numel(), dtype=places.dtype, device=places.device))
