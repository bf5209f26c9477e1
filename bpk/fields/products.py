"""Products of what one sweep has brought to one parameter: of rows with rows, with directions, and sums of rows.

Rows `[V, N, *p]` are not built where all uses have them as outer products, and otherwise a few samples at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from bpk.fields.rows import Rows, once
from bpk.jacobians.core import outer
from bpk.jacobians.core.errors import UnsupportedLayer, value_error
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.outer import Outer, Some
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.families.no_rows import NoRows
from bpk.plan.stretch_call import StretchCall


class Products(Rows):
    """Rows that are multiplied; `V` columns over all blocks, `n` samples that are considered."""

    @property
    @once
    def lead(self) -> tuple[int, int]:
        """`V, n`."""
        return sum(map(self.columns_of, self.keys)), self.count

    def gram(self, split: int | None = None, aligned: bool = False) -> Tensor:
        """`<rows_vn, rows_wm>` `[V, n, V, n]`: those of the first `split` samples with those of the others, or all.

        `aligned` has each column with itself only: `[V, n, n]`.
        """
        n = self.lead[1]
        left, right = (slice(0, n), slice(0, n)) if split is None else (slice(0, split), slice(split, n))
        blocks = [self.outers_of([key]) for key in self.keys]
        if all(blocks):
            parts = zip(*blocks, strict=True)
            return add_up([outer.gram(part, left, right, aligned) for part in parts])
        lines = list[Tensor]()
        for ours in self.pieces(left):
            lines.append(concatenated([between(ours, theirs, aligned) for theirs in self.pieces(right)], -1))
        return concatenated(lines, 1)

    def sample_gram(self, weight: Tensor | None = None) -> Tensor:
        """`sum_e w_e rows_vne rows_une`, of each sample for itself: `[n, V, V]`; `weight` is `[*p]`."""
        if self.outers:
            parts = [(part, None if weight is None else part.matrix(weight)) for part in self.outers]
            return add_up([outer.sample_gram(part, some) for part, some in parts])
        scale = 1.0 if weight is None else weight.flatten()
        each = (rows.transpose(0, 1) for rows in self.pieces())
        return concatenated([outer.times(rows * scale, rows.mT) for rows in each])

    def rotated_gram(self, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        """`sample_gram` of `left r right^T`, with rows as matrices as the parameter's Kronecker factors see them."""
        left, right, weight = wide(left), wide(right), wide(weight)
        if self.outers:
            pairs = zip(self.outers, self.by_part(left, self.outers), strict=True)
            rotated = [part.rotated(some, right) for part, some in pairs]
            return outer.sample_gram(reduce(sum_of_outers, rotated), weight[None])
        with_rows, found = [use for use in self.uses if not isinstance(use.rule, NoRows)], []
        if not with_rows:  # an expert to which nothing was sent
            return weight.new_zeros(self.lead[1], self.lead[0], self.lead[0])
        use = with_rows[0]
        parts = use.rule.outer(use.call, next(iter(use.arrived.blocks.values())), use.name)
        if not parts:
            raise UnsupportedLayer(
                f"{use.rule.name} does not say how Kronecker factors of '{use.name}' see its rows.",
                "the rule has kron_input, and no outer.",
                "give the rule the method outer, or use another posterior for this parameter.",
            )
        scales = self.by_part(left, parts)
        for rows in self.pieces():
            each = rows.view(*rows.shape[:2], *self.param.shape)
            seen = [
                torch.einsum("px,vnxi->vnpi", q, part.matrix(each).flatten(2, 3))
                for part, q in zip(parts, scales, strict=True)
            ]
            turned = add_up(seen) @ right.T
            found.append(torch.einsum("vnpi,pi,unpi->nvu", turned, weight, turned))
        return torch.cat(found)

    def by_part(self, left: Tensor, parts: Sequence[Outer]) -> Sequence[Tensor]:
        """The columns of the first factor's basis that each part of the rows meets."""
        sizes = [part.columns.shape[2:4].numel() for part in parts]
        if sum(sizes) != left.shape[1]:
            raise value_error(
                f"A Kronecker factor with {left.shape[1]} rows cannot be that of the outputs of a parameter of shape "
                f"{list(self.param.shape)}.",
                f"its rows have {sum(sizes)} outputs, and factors stand in the order in which KFAC saves them.",
                "pass what KFAC saves, parameter.kfac, as it is.",
            )
        return left.split(sizes, 1)

    def along(self, directions: Tensor) -> Tensor:
        """`<rows_vn, d_k>` `[V, n, K]`, for directions `[K, *p]`."""
        if self.outers:
            return add_up([outer.along(part, directions) for part in self.outers])
        flat = wide(directions).reshape(len(directions), -1)
        return concatenated([outer.times(rows.transpose(0, 1), flat.T) for rows in self.pieces()]).transpose(0, 1)

    def projected(self, left: Tensor, right: Tensor) -> Tensor:
        """`left r right^T` `[V, n, k, l]`, with rows as matrices of the parameter's first axis and the others."""
        left, right = wide(left), wide(right)
        rest = right.shape[1]
        numbers = torch.arange(self.param.numel(), dtype=torch.int32, device=self.param.device).view(self.param.shape)
        places = [part.matrix(numbers).flatten(-3, -2) for part in self.outers]
        if places and all(is_view(at, numbers, (left.shape[1], rest)) for at in places):
            return add_up([part.rotated(left, right).rows() for part in self.outers]).transpose(0, 1)
        straight = all(torch.equal(at, at[:, :1] // rest * rest + at[:1] % rest) for at in places)
        turned = all(torch.equal(at, at[:1] // rest * rest + at[:, :1] % rest) for at in places)
        if not places or not (straight or turned):
            return torch.cat([left @ rows.unflatten(2, (-1, rest)) @ right.T for rows in self.pieces()], 1)
        found = []
        for part, at in zip(self.outers, places, strict=True):
            if straight:
                found.append(part.rotated(left[:, at[:, 0] // rest], right[:, at[0] % rest]).rows())
            else:
                found.append(part.rotated(right[:, at[:, 0] % rest], left[:, at[0] // rest]).rows().mT)
        return add_up(found).transpose(0, 1)

    def sum_of_rows(self, key: Hashable) -> Tensor:
        """`sum_n rows_vn` `[V, *p]` of a block."""
        return add_up(
            use.rule.jac_t_mat_prod(use.call, use.arrived.blocks[key], use.name, sum_batch=True)
            for use in self.uses
            if key in use.arrived.blocks
        )

    # ---- how rows are seen -----------------------------------------------------------------------------
    def pieces(self, part: slice = slice(None)) -> Iterator[Tensor]:
        """Rows `[V, B, P]` of some samples, a few at a time where calls can be restricted to these."""
        (v, n), p = self.lead, self.param.numel()
        start, stop, _ = part.indices(n)
        whole = any(use.samples is not None or isinstance(use.call, StretchCall) for use in self.uses)
        if whole or self.keeps_rows or torch.is_grad_enabled() or v * n * p <= outer.ROOM:
            yield wide(self.all_rows()[:, start:stop]).reshape(v, stop - start, p)
            return
        for some in outer.pieces(start, stop, v * p):
            few = self.of_samples(range(some.start, some.stop))
            yield wide(few.all_rows()).reshape(v, some.stop - some.start, p)

    @property
    @once
    def outers(self) -> Sequence[Outer]:
        """Rows as outer products, positions of several uses side by side; nothing where not all uses have them so."""
        return self.outers_of(self.keys)

    def outers_of(self, keys: Sequence[Hashable]) -> Sequence[Outer]:
        """The same of some blocks of columns."""
        found: list[Outer] = []
        for number, use in enumerate(self.uses):
            if use.own or use.arrived.blocks.keys() != set(self.keys):
                return ()
            parts = use.rule.outer(use.call, concatenated([use.arrived.blocks[key] for key in keys]), use.name)
            ordered = [part if use.samples is None else by_sample(part, use.samples, self.batch_size) for part in parts]
            known = [part for part in ordered if part is not None]
            if not known or len(known) < len(ordered) or (number and not self.alike(found, known)):
                return ()
            pairs = zip(found, known, strict=True)
            found = [sum_of_outers(a, b) for a, b in pairs] if number else known
        return found

    def alike(self, left: Sequence[Outer], right: Sequence[Outer]) -> bool:
        """Whether two uses see the parameter in the same way."""
        numbers = torch.arange(self.param.numel(), device=self.param.device).view(self.param.shape)
        shown = [[part.matrix(numbers) for part in parts] for parts in (left, right)]
        return len(left) == len(right) and all(map(torch.equal, *shown))


def between(ours: Tensor, theirs: Tensor, aligned: bool) -> Tensor:
    """Inner products of rows `[V, B, P]`, `[V, C, P]`: `[V, B, V, C]`, or `[V, B, C]` if `aligned`."""
    return ours @ theirs.mT if aligned else torch.einsum("vnp,wmp->vnwm", ours, theirs)


def is_view(matrix: Tensor, numbers: Tensor, shape: tuple[int, int]) -> bool:
    """Whether a matrix of this shape has all numbers in their order, which shows without looking at them."""
    return matrix.shape == shape and matrix.data_ptr() == numbers.data_ptr() and matrix.is_contiguous()


def by_sample(part: Outer, samples: Tensor, n: int) -> Outer | None:
    """Rows of a call as positions of the sample that they belong to, if all have equally many."""
    counts = torch.bincount(samples.clamp(min=0), minlength=n)
    if n == 0 or bool((counts != counts[0]).any()) or bool((samples < 0).any()):
        return None
    order = samples.argsort(stable=True).view(n, -1)

    def together(x: Tensor) -> Tensor:
        """`[..., B, r, G, C, T]` as `[..., B, G, C, r T]`."""
        return x.movedim(-4, -2).flatten(-2)

    def patches(some: Some) -> Tensor:
        rows = order[some]
        found = part.patches(rows.flatten())
        return together(found.view(*rows.shape, *found.shape[1:]))

    return replace(part, columns=together(part.columns[:, order]), patches=patches)


def sum_of_outers(first: Outer, second: Outer) -> Outer:
    """The sum of two rows, as one."""

    def patches(some: Some) -> Tensor:
        return torch.cat([first.patches(some), second.patches(some)], -1)

    return replace(first, columns=torch.cat([first.columns, second.columns], -1), patches=patches)
