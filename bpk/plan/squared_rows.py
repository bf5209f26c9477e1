"""Squares of rows of all parameters of a stretch at once, from rows of some columns and samples at a time.

Rows `[V, N, *p]` of a weight that functions compute take as much memory as individual gradients, times columns. What is
made of them here is small, so rows are let go of as soon as they have been added.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import LARGE, wide
from bpk.jacobians.core.rows_through import RowsThrough, materialised
from bpk.jacobians.core.side_by_side import as_rows


class Of(Enum):
    """What squares are added up over, of columns `V`, samples `N` and entries: what is left is `[*p]`, and so on."""

    BATCH = "columns and samples"
    SAMPLES = "columns"
    NORMS = "columns and entries"


class SquaredRows:
    """Sums of squares over what `of` says, by number of the parameter; there are so many `samples`."""

    def __init__(self, of: Of, samples: int) -> None:
        self.of, self.samples = of, samples
        self.totals: dict[int, Tensor] = {}
        self.shapes: dict[int, torch.Size] = {}

    def add(self, rows: Mapping[int, Tensor | RowsThrough], here: slice | Tensor, weights: Tensor | None) -> None:
        """Add those of rows `[V, B, *p]` of the samples `here`, times weights `[V, B]`."""
        for k, each in rows.items():
            if isinstance(each, RowsThrough) and self.of is not Of.NORMS:
                found = as_rows(wide(each.squares(weights, self.of is Of.SAMPLES)), int(self.of is Of.SAMPLES))
                self.total(k, each.jacobian.shape[1:], found)[here if self.of is Of.SAMPLES else 0] += found
                continue
            whole = materialised(each)
            flat = wide(as_rows(whole, 2))
            total = self.total(k, whole.shape[2:], flat)
            if self.of is Of.NORMS:
                squares = torch.linalg.vector_norm(flat, dim=2).square()
                total[here, 0] += (squares if weights is None else squares * weights).sum(0)
            else:
                self.add_squares(total, flat, here, weights)

    def total(self, k: int, shape: torch.Size, like: Tensor) -> Tensor:
        """What has been added for a parameter `[1 or N, D or 1]`."""
        if k not in self.totals:
            rows = 1 if self.of is Of.BATCH else self.samples
            self.totals[k] = like.new_zeros(rows, 1 if self.of is Of.NORMS else shape.numel())
            self.shapes[k] = shape
        return self.totals[k]

    def add_squares(self, total: Tensor, rows: Tensor, here: slice | Tensor, weights: Tensor | None) -> None:
        """Add weighted squares of rows `[V, B, D]`: large ones one by one, without a tensor for them."""
        by_sample = self.of is Of.SAMPLES
        if rows.shape[2] >= LARGE and rows.device.type == "cpu":
            goals = total[here] if by_sample else total.expand(rows.shape[1], -1)
            factors = None if weights is None else weights.tolist()
            for v, column in enumerate(rows):
                for n, row in enumerate(column):
                    goals[n].addcmul_(row, row, value=1.0 if factors is None else factors[v][n])
            if by_sample and isinstance(here, Tensor):
                total[here] = goals
            return
        squares = rows.square()
        if not by_sample:
            flat = squares.flatten(0, 1)
            total[0] += flat.sum(0) if weights is None else weights.reshape(-1).to(flat) @ flat
        elif weights is None:
            total[here] += squares.sum(0)
        else:
            total[here] += torch.einsum("vb,vbd->bd", weights.to(squares), squares)

    def add_scaled(self, k: int, rows: Tensor, factors: Tensor, numbers: Tensor, here: slice) -> None:
        """Add squares of rows `[B, *p]`, each entry times the factor `[B, F]` of its number, which may be broadcast."""
        shape, rows = rows.shape[1:], wide(rows)
        total = self.total(k, shape, rows)
        for row, known, n in zip(rows, factors.to(rows.dtype), range(here.start, here.stop), strict=True):
            goal = total[n if self.of is Of.SAMPLES else 0].view(shape)
            goal.addcmul_(row * known[numbers], row)

    def result(self, k: int, dtype: torch.dtype) -> Tensor:
        """The sum: `[*p]`, `[N, *p]` or `[N]`."""
        total, shape = self.totals[k].to(dtype), self.shapes[k]
        if self.of is Of.NORMS:
            return total[:, 0]
        return total.view(shape) if self.of is Of.BATCH else total.view(len(total), *shape)
