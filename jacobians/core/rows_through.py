"""Rows that all pass something small, which is the same for all samples: columns there, times one Jacobian."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bpk.jacobians.core.numeric import sum_of_squared_rows
from bpk.jacobians.core.side_by_side import as_rows


@dataclass(frozen=True)
class RowsThrough:
    """Rows `[V, N, *p]` as columns `m` `[V, N, D]` times a Jacobian `J` `[D, *p]`: `rows_vn = J^T m_vn`."""

    columns: Tensor
    jacobian: Tensor

    def rows(self) -> Tensor:
        """The rows themselves."""
        found = self.columns @ as_rows(self.jacobian)
        return found.reshape(*self.columns.shape[:2], *self.jacobian.shape[1:])

    def squares(self, weights: Tensor | None, per_sample: bool) -> Tensor:
        """`sum_v w_vn rows_vn^2`, of weights `[V, N]`: `[*p]`, or `[N, *p]` where `per_sample`.

        `diag(J^T S J)` with `S = sum_v w_v m_v m_v^T`, where there are more columns than entries of `m`, and rows are
        larger than these.
        """
        m = self.columns.movedim(1, 0) if per_sample else self.columns.flatten(0, 1)[None]  # [N or 1, V, D]
        if min(m.shape[1], self.jacobian.shape[1:].numel()) <= m.shape[2]:
            return sum_of_squared_rows(self.rows(), weights, per_sample)
        weighted = m
        if weights is not None:
            weighted = m * (weights.T if per_sample else weights.reshape(1, -1))[..., None]
        j = as_rows(self.jacobian)
        found = ((weighted.mT @ m @ j) * j).sum(1)
        if weights is None:  # rounding may leave less than the zero that sums of squares are
            found = found.clamp(min=0)
        shape = self.jacobian.shape[1:]
        return found.reshape(-1, *shape) if per_sample else found.reshape(shape)


def materialised(rows: Tensor | RowsThrough) -> Tensor:
    """Rows `[V, N, *p]`, however they are given."""
    return rows.rows() if isinstance(rows, RowsThrough) else rows
