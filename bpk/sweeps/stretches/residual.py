"""The second derivative of a stretch of plain autograd, contracted with a gradient, as signed columns.

The dense matrix of one sample has as many rows as the stretch has beginnings. Most functions look at positions one by
one (`x.sin()`, `x * y`), or along some axes only (a normalisation over channels): along all others the matrix is
block-diagonal. Which axes these are is found by probing: with a factor `f` that varies along such an axis,
`R (f w) = f R w` for any `w`. Then one product gives a column of the blocks of all positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.side_by_side import beside, taken_apart
from bpk.jacobians.second_order.bordered import compressed
from bpk.jacobians.second_order.factoring import factor
from bpk.jacobians.second_order.probing import draw
from bpk.jacobians.second_order.signed_blocks import BlockDiagonal, Signed, numbered
from bpk.jacobians.second_order.structure import Blocks, Couplings
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, as_lazy
from bpk.sweeps.stretches.no_second_derivative import differentiable_twice
from bpk.sweeps.stretches.products import Group, StretchProducts

Groups = list[LazyColumns]
"""The same, by number, made a few at a time."""


AT_ONCE = 1 << 24
"""How many numbers products with the second derivative hold at a time."""


class StretchResidual(StretchProducts):
    """`R` as signed columns: all positions at once, or one sample after the other."""

    def columns(self) -> Group | None:
        """Its eigendecomposition, jointly over targets and parameters, sample by sample (`None`: it is zero)."""
        with differentiable_twice(self.source, self.at_end):
            if self.is_zero:
                return None
            self.require_samples()
            self.require_values_only()
            alone = self.rows is None and not self.source.trained
            return self.of_targets_alone() if alone else self.by_sample(balanced=False)

    def separate_columns(self) -> tuple[Group, Group]:
        """Those of the targets without the parameters, and of the parameters without the targets (zero in the others).

        Only asked for where `columns` are there.
        """
        with differentiable_twice(self.source, self.at_end):
            targets = self.of_targets_alone() if self.shapes else self.by_sample(balanced=False)
            found = [lazy.all() for lazy in self.of_parameters(balanced=False)]
        nothing = [self.grad.new_zeros(1, *shape) for shape in self.shapes]
        lacking = [self.grad.new_zeros(1, len(self.grad), *shape) for shape in self.of_trained]
        params = found[0] if found else (dict(enumerate([*nothing, *lacking])), self.grad.new_zeros(1, len(self.grad)))
        return targets, (list(params[0].values()), params[1])

    def of_targets_alone(self) -> Group:
        """The eigendecomposition of `R_xx`; parameters have zeros."""
        parts, signs = self.by_position().all()
        own = [signs.new_zeros(()).expand(*signs.shape, *shape) for shape in self.of_trained]
        return [*parts.values(), *own], signs

    def groups(self, by_row: bool = False) -> Groups:
        """Signed columns `u_k` with `R = sum_k s_k u_k u_k^T`, in as many groups as it takes.

        `by_row`: rows of the targets stand for samples, whatever is at the end.
        """
        with differentiable_twice(self.source, self.at_end):
            if self.is_zero:
                return []
            if not by_row:
                self.require_samples()
            self.require_values_only()
            if self.rows is not None:
                parts, signs = self.by_sample(balanced=True)
                return [as_lazy(dict(enumerate(parts)), signs)]
            if not self.source.trained:
                return [self.without_axis(lazy) for lazy in self.in_blocks()]
            found = [*([self.with_parameters()] if self.shapes else []), *self.of_parameters(balanced=True)]
            return [self.without_axis(lazy) for lazy in found]

    def diagonal(self) -> Tensor | None:
        """The diagonal `[N, *x]` of a residual that is one, in the only target."""
        if self.rows is not None or self.merged or self.source.trained or len(self.shapes) != 1:
            return None
        with differentiable_twice(self.source, self.grad):
            if self.is_zero or self.shapes[0][0] != len(self.grad) or self.blocks.sizes != [1]:
                return None
            self.require_values_only()
            return self.product([self.grad.new_ones(1, *self.shapes[0])])[0][0]

    def without_axis(self, lazy: LazyColumns) -> LazyColumns:
        """Columns at targets as `[K, N, *x]`, where inside the only sample has an axis of its own."""
        if not self.merged:
            return lazy

        def make(start: int, stop: int) -> Chunk:
            mats, signs = lazy.make(start, stop)
            return {k: mat[:, 0] if int(k) < len(self.shapes) else mat for k, mat in mats.items()}, signs

        return replace(lazy, make=make)

    @property
    def keeps_rows_separate(self) -> bool:
        """Whether the rows of a merged batch are treated one by one, each giving one at the end (or nothing bends)."""
        if self.is_zero:
            return True
        same = all(shape[1:2] == self.grad.shape[1:2] for shape in self.shapes)
        return same and bool(self.shapes) and 1 in self.blocks.axes

    @property
    def couples_no_rows(self) -> bool:
        """Whether no row of a target is coupled with another one (all have as many)."""
        count = self.shapes[0][0]
        labels = [torch.arange(count, device=self.grad.device).reshape(-1, *[1] * (len(s) - 1)) for s in self.shapes]
        with differentiable_twice(self.source, self.grad):
            return not self.is_zero and self.couplings.none_between(labels, count)

    # ---- all samples and positions at once --------------------------------------------------------------
    @cached_property
    def couplings(self) -> Couplings:
        """Which entries of targets depend on each other."""
        me = weakref.proxy(self)  # what leads back here would keep the graph until Python's collector comes
        return Couplings(lambda mats: me.product(mats)[: len(me.shapes)], self.shapes, self.grad)

    @cached_property
    def blocks(self) -> Blocks:
        """Along which axes targets are treated one by one."""
        return self.couplings.blocks()

    def by_position(self) -> LazyColumns:
        """Eigendecomposition of the blocks of all positions."""
        vectors, signs = factor(self.of_targets().flatten(0, 1))
        return self.spread(vectors.reshape(-1, *self.dense_shape), signs)

    def in_blocks(self) -> Groups:
        """Columns of the blocks of all positions, and of those inside of them, by their structure."""
        shapes = {k: shape[1:] for k, shape in enumerate(self.shapes)}

        def multiply(columns: Tensor) -> Tensor:
            return beside(self.product([*taken_apart(columns, shapes, 2).values()])[: len(shapes)], 2)

        def lazy(signed: Signed) -> LazyColumns:
            def make(start: int, stop: int) -> Chunk:
                columns, signs = signed.columns(start, stop)
                return dict(enumerate(taken_apart(columns, shapes, 2).values())), signs

            return LazyColumns(signed.count, make, unit=signed.unit)

        at, part = (x.to(self.grad.device) for x in (self.blocks.indices, numbered(self.blocks.sizes)))
        blocks = BlockDiagonal(multiply, at, part, self.grad.new_zeros(self.shapes[0][0]))
        return [lazy(signed) for signed in blocks.columns()]

    def spread(
        self, vectors: Tensor, signs: Tensor, rows: Callable[[Tensor], list[Tensor]] | None = None
    ) -> LazyColumns:
        """Columns of blocks `[B, N, P, B]` as columns of samples; `rows` gives the parameters' share of some."""
        n, positions, _ = self.dense_shape
        signed = signs.reshape(-1, n, positions).movedim(2, 1).flatten(0, 1)

        def make(start: int, stop: int) -> Chunk:
            here = torch.arange(start, stop, device=vectors.device)
            parts = self.blocks.at_positions(vectors, here) + (rows(here) if rows is not None else [])
            return dict(enumerate(parts)), signed[start:stop]

        return LazyColumns(len(signed), make)

    @property
    def dense_shape(self) -> tuple[int, int, int]:
        """`N`, the number of positions, and the rows of a block."""
        return self.shapes[0][0], self.blocks.positions, sum(self.blocks.sizes)

    def of_targets(self) -> Tensor:
        """`R_xx` of every sample and position: `[N, P, B, B]`."""
        n, positions, size = self.dense_shape
        rows = []
        for part in torch.eye(size, dtype=self.grad.dtype, device=self.grad.device).split(self.at_once):
            split = enumerate(part.split(self.blocks.sizes, 1))
            mats = [self.blocks.from_blocks(k, p[:, None, None].expand(-1, n, positions, -1)) for k, p in split]
            rows.append(self.to_blocks(self.product(mats)))
        return torch.cat(rows).permute(1, 2, 0, 3)

    def to_blocks(self, found: Sequence[Tensor]) -> Tensor:
        """Products at all targets as `[K, N, P, B]`."""
        return torch.cat([self.blocks.to_blocks(k, mat) for k, mat in enumerate(found[: len(self.shapes)])], 3)

    @property
    def at_once(self) -> int:
        """How many columns to multiply at once."""
        return max(1, AT_ONCE // sum(shape.numel() for shape in self.shapes))

    # ---- with parameters ------------------------------------------------------------------------------
    def with_parameters(self) -> LazyColumns:
        """`[[R_xx, R_xp], [R_px, 0]]`, position by position."""
        n, positions, size = self.dense_shape
        params = sum(shape.numel() for shape in self.of_trained)
        mixed = []
        for part in torch.eye(params, dtype=self.grad.dtype, device=self.grad.device).split(self.at_once):
            zeros = [part.new_zeros(len(part), *shape) for shape in self.shapes]
            mixed.append(self.to_blocks(self.product([*zeros, *self.by_parameter(part)])))
        border = torch.cat(mixed).permute(1, 2, 3, 0)  # [N, P, B, params]
        dense, basis = compressed(self.of_targets(), border)
        vectors, signs = factor(dense.flatten(0, 1), balanced=True)
        vectors = vectors.reshape(-1, n, positions, dense.shape[3])

        def rows(here: Tensor) -> list[Tensor]:
            first, last = int(here[0]), int(here[-1]) + 1
            parts = []
            for column in range(first // positions, (last - 1) // positions + 1):  # bases are too large to be copied
                some = slice(max(0, first - column * positions), min(positions, last - column * positions))
                inner = vectors[column, :, some, size:]  # [N, P, r]
                parts.append(torch.einsum("npr,npqr->pnq", inner, basis[:, some]))
            return self.by_parameter(torch.cat(parts))

        return self.spread(vectors[..., :size], signs, rows)

    def of_parameters(self, balanced: bool) -> Groups:
        """`R_pp` of every sample (nothing where the stretch is linear in its parameters)."""
        zeros = [self.grad.new_zeros(1, *shape) for shape in self.shapes]
        probe = [draw((1, *shape), self.grad, k) for k, shape in enumerate(self.of_trained)]
        if not any(bool(mat.any()) for mat in self.product([*zeros, *probe])[len(self.shapes) :]):
            return []
        size = sum(shape.numel() for shape in self.of_trained)
        dense = []
        for n in range(len(self.grad)):
            of_sample = torch.zeros_like(self.grad)
            of_sample[n] = self.grad[n]
            found = self.pull_units(self.pulled(of_sample)[len(self.shapes) :], len(self.shapes))
            dense.append(torch.cat([mat.reshape(size, -1) for mat in found], 1))
        vectors, signs = factor(torch.stack(dense), balanced)
        nothing = [vectors.new_zeros(()).expand(len(vectors), *shape) for shape in self.shapes]
        return [as_lazy(dict(enumerate([*nothing, *self.by_parameter(vectors)])), signs)]
