"""Sums, squares and norms of what one sweep has brought to one parameter."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE, ClosedForm
from bpk.fields.products import Products
from bpk.fields.rows import once
from bpk.fields.sums import add_into, squared_norms, squares, weighted_sum
from bpk.jacobians.core.numeric import cancel, wide
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.rows_through import RowsThrough
from bpk.jacobians.core.transposed import are_transposed, cost_of, inner_products
from bpk.plan.samples.rows import along_rows


class Squares(Products):
    """Rows that are squared, or summed over samples."""

    @once
    def squared_sum(self, per_sample: bool = False) -> Tensor:
        """`sum_v s_v (rows_v)^2`, elementwise: `[*p]`, or `[N, *p]` where `per_sample`."""
        use = self.uses[0]
        if isinstance(use.arrived, ClosedForm):
            use.call.spares = self.spares
            found = use.arrived.squares(per_sample)
            use.call.spares = None
            return found
        if not per_sample and self.keeps_samples and not self.shortcut:
            return self.squared_sum(per_sample=True).sum(0)
        if not self.simple:
            return add_up([self.squares_of(key, per_sample) for key in self.keys])
        if self.keeps_rows and not self.shortcut:
            return squares(self.all_rows(), self.signs_of(self.keys), per_sample)
        mats: dict[Hashable, Tensor] = use.arrived.blocks
        total: Tensor | None = None
        use.call.spares = self.spares
        if len(mats) > 1:
            signs = self.signs_of(mats)
            total = use.rule.squared_sum_of_blocks(use.call, list(mats.values()), use.name, signs, per_sample)
        for mat, known in self.blocks() if total is None else ():
            part = use.rule.squared_sum(use.call, mat, use.name, known, per_sample)
            total = part if total is None else add_into(total, part)
        use.call.spares = None
        assert total is not None
        return total

    def squares_of(self, key: Hashable, per_sample: bool) -> Tensor:
        """The same of one block; no rows are made that pass something smaller."""
        use, through = self.uses[0], None
        if len(self.uses) == 1 and key not in use.own and not self.keeps_rows:
            through = use.rule.rows_through(use.call, use.arrived.blocks[key], use.name)
        if through is None:
            return squares(self.rows(key), self.signs[key], per_sample)
        of_samples = RowsThrough(self.by_sample(through.columns, use), through.jacobian)
        return of_samples.squares(self.signs[key], per_sample)

    def norm_squared(self) -> Tensor:
        """`[N]`: squared norms of the rows of a single column."""
        if self.simple and (self.shortcut or not self.keeps_rows):
            use = self.uses[0]
            column = self.blocks()[0][0][0] if use.arrived.single is None else use.arrived.single
            return use.rule.norm_squared(use.call, column, use.name)
        found = self.norm_of_transposed()
        if found is not None:
            return found
        n, step = self.count, max(1, PIECE // max(1, self.param.numel()))
        if n > step and not (self.keeps_rows or self.simple or torch.is_grad_enabled()) and self.batch_size > 1:
            starts = range(0, n, step)
            return torch.cat([self.of_samples(range(k, min(k + step, n))).norm_squared() for k in starts])
        return squared_norms(self.individual())

    def norm_of_transposed(self) -> Tensor | None:
        """The same where two calls see a matrix, one of them transposed, and norms and products take less than rows."""
        if len(self.uses) != 2 or self.keeps_rows or not self.param.is_cpu or torch.is_grad_enabled():
            return None
        if any(use.samples is not None or use.name in use.arrived.of_params or use.own for use in self.uses):
            return None
        uses = [(use, use.arrived.single) for use in self.uses if use.arrived.single is not None]
        parts = [part for use, column in uses for part in use.rule.outer(use.call, column[None], use.name)]
        if len(uses) != 2 or len(parts) != 2:
            return None
        first, second = parts
        rows = self.param.numel() * (first.shape[-1] + second.shape[-1])
        if not are_transposed(first, second, self.param) or cost_of(first, second) > rows:
            return None
        own = add_up([wide(use.rule.norm_squared(use.call, column, use.name)) for use, column in uses])
        both = 2 * inner_products(first, second)[0]
        found = own + both
        return None if bool(cancel(found, own + both.abs()).any()) else found.to(uses[0][1].dtype)

    def summed(self, weights: Tensor | None = None) -> Tensor:
        """`[*p]`: the single column summed over samples (for the gradient sweep: the gradient), with weights `[N]`."""
        if self.gradient is not None and weights is None:
            return self.gradient
        first, shares = self.uses[0], weights is None and self.simple
        if shares and first.call.sums is not None and first.name in first.call.sums:
            return first.call.sums[first.name]
        if shares and self.few:
            return self.individual().sum(0)
        parts = [
            use.rule.jac_t_mat_prod(use.call, self.weighted(mat, weights, use.samples), use.name, sum_batch=True)[0]
            for use in self.uses
            for mat in use.arrived.blocks.values()
        ]
        own = [rows for use in self.uses for rows in use.own.values()]
        total = add_up([*parts, *(r[0].sum(0) if weights is None else weighted_sum(weights, r[0]) for r in own)])
        add = first.call.summing(first.name) if shares else None
        if add is not None:
            add(total)
        return total

    def weighted(self, mat: Tensor, weights: Tensor | None, samples: Tensor | None) -> Tensor:
        """A block `[V, R, *out]`, with the rows of sample `n` times its weight."""
        if weights is None:
            return mat
        return mat * along_rows(weights if samples is None else weights[samples], mat, 1)
