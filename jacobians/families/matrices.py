"""Squares and norms of a single column of a linear layer with positions, whose rows fit into a buffer."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from bpk.jacobians.core import cost
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import CACHE, LARGE, products, squares_of_rows, wide
from bpk.jacobians.families.affine import Affine


class Matrices(Affine):
    """What the family "weight times patches" does where a column and its patches are matrices, in fewer steps.

    In small networks, each step takes as long as what it computes.
    """

    @abstractmethod
    def has_matrices(self, call: Call) -> bool:
        """Whether a column and its patches are matrices `[N, O, T]` and `[N, I, T]`, and no graph is built."""

    def factors_of_rows(self, call: Call, column: Tensor) -> tuple[Tensor, Tensor]:
        """A column and its patches as they are multiplied for each sample: `[N, O, T]` and `[N, I, T]`."""
        return column.flatten(1, -2).mT, call.inputs[0].flatten(1, -2).mT

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        size = self.size_of_rows(call, grad_out)
        if size is None:
            return super().norm_squared(call, grad_out, param)
        if param != "weight":
            return grad_out.flatten(1, -2).sum(1).square().sum(1)
        add, gained = call.summing(param), 0.0
        if add is not None:
            gained = cost.gradient(size) - cost.adding_up(size)
        if cost.by_grams(size) < cost.by_rows(size) - gained:
            return super().norm_squared(call, grad_out, param)
        rows = products(*self.factors_of_rows(call, grad_out))
        if add is not None:
            add(rows.sum(0))
        return squares_of_rows(rows.view(size.n, -1))

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        size = None if len(mat) != 1 or weights is not None or per_sample else self.size_of_rows(call, mat[0])
        if size is None:
            return super().squared_sum(call, mat, param, weights, per_sample)
        if param != "weight":
            return mat[0].flatten(1, -2).sum(1).square_().sum(0)
        add = call.summing(param)
        if add is None and cost.by_pairs(size) < cost.by_columns(size):
            return super().squared_sum(call, mat, param)
        rows = products(*self.factors_of_rows(call, mat[0]))
        if add is not None:
            add(rows.sum(0))
        return rows.square_().sum(0)

    def size_of_rows(self, call: Call, column: Tensor) -> cost.Size | None:
        """How large the products of a column `[N, *t, O]` with its patches are, if a buffer holds them."""
        if not self.has_matrices(call) or wide(column) is not column or call.inputs[0].dtype is not column.dtype:
            return None
        o, i = call.params["weight"].shape
        size = cost.Size(1, len(column), 1, o, i, column.shape[1:-1].numel())
        held = size.n * o * max(i, size.t)
        return size if size.t > 1 and held <= CACHE and o * i < LARGE // 2 and column.is_cpu else None
