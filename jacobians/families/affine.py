"""Layers that multiply a weight with patches of their input: Linear, Bilinear and every convolution.

Squares, norms and Kronecker factors of weight and bias, from the form that the layer declares (`patches.py`), without
individual gradients where these are not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.core import cost, gemm, norms, squares
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.numeric import squares_of_rows, sum_of_squares, wide
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.room import require_room
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.families.patches import WeightTimesPatches


class Affine(WeightTimesPatches):
    """The family "weight times patches, plus bias"."""

    knows_diagonals = True
    averages_inputs = True
    reads_output = False
    sums_by_product = True

    def has_cheap_squares(self, call: Call, param: str) -> bool:
        """With one position squares factorise; a bias has few entries anyway."""
        return param != "weight" or self.positions(call) == 1

    def sums_pay(self, call: Call, param: str) -> bool:
        if param != "weight" or call.output.numel() < cost.FEW or not call.output.is_cpu:
            return False  # on other devices it was not measured
        entries = call.params["weight"].numel()  # in all groups: both depend on their number alone
        size = cost.Size(1, call.batch_size, 1, 1, entries, self.positions(call))
        return cost.gradient(size) > cost.adding_up(size)

    def adding_up(self, call: Call) -> squares.Shown:
        """What adds up individual gradients of the weight, if somebody wants their sum: into the first."""
        add, sums = call.summing("weight"), call.sums
        if add is None or sums is None:
            return None
        return lambda rows: add(self.as_weight(call, rows[0] if len(rows) == 1 and "weight" in sums else rows.sum(0)))

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        if torch.is_grad_enabled():
            return super().squared_sum(call, mat, param, weights, per_sample)
        return self._squares(call, [mat], param, weights, per_sample)

    def squared_sum_of_blocks(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor | None:
        """All blocks at once, so that the patches are gathered and multiplied once for all of them."""
        if torch.is_grad_enabled() or (param == "weight" and self.positions(call) == 1):
            return None
        return self._squares(call, mats, param, weights, per_sample)

    def _squares(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor:
        x = self.vectors(call)
        if param != "weight":
            rows = [mat if x is not None else self._over_positions(call, mat) for mat in mats]
            found, _ = call.of_columns(concatenated(rows), weights, sum_of_squares)
            return (found.clone() if per_sample else found.sum(0)).to(mats[0].dtype)
        if x is not None and len(mats) == 1:
            found, _ = call.of_columns(mats[0], weights, sum_of_squares)
            return gemm.times_squares_of(found, wide(x), per_sample, call.room).to(mats[0].dtype)
        blocks, width = [self.as_columns(call, mat) for mat in mats], self._matrix_shape(call)[2]
        patches, shown = partial(self.patches, call), self.adding_up(call)
        return self.as_weight(call, squares.squared_sum(patches, blocks, width, weights, per_sample, call.empty, shown))

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        if param != "weight":
            return ()
        width, matrix = self._matrix_shape(call)[2], partial(self.as_matrix, call)
        return [Outer(self.as_columns(call, mat), partial(self.patches, call), width, matrix)]

    def has_disjoint_rows(self, call: Call) -> bool:
        return self.positions(call) == 1

    def squares_of_diagonal(self, call: Call, diag: Tensor, param: str, per_sample: bool = False) -> Tensor:
        x = self.vectors(call)
        if param != "weight":
            rows = self._over_positions(call, diag[None])[0] if x is None else diag.clone() if per_sample else diag
        elif x is not None and not torch.is_grad_enabled():
            return gemm.times_squares_of(diag, x, per_sample, call.room)
        elif self.positions(call) == 1 and not per_sample:
            columns = self.as_columns(call, diag[None])[0]
            return self.as_weight(call, torch.einsum("ngot,ngit->goi", columns, self.patches(call).square()))
        else:
            columns, width = self.as_columns(call, diag[None]), self._matrix_shape(call)[2]
            found = gemm.per_sample(lambda some: self.patches(call, some).square(), columns, width, call.empty)
            rows = self.as_weight(call, found)[0]
        return rows if per_sample else rows.sum(0)

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        x = self.vectors(call)
        if x is not None:
            found = squares_of_rows(wide(grad_out))
            return (found if param != "weight" else found * squares_of_rows(wide(x))).to(grad_out.dtype)
        if param != "weight":
            return wide(self._over_positions(call, grad_out[None])[0]).square().sum(1).to(grad_out.dtype)
        columns, width = self.as_columns(call, grad_out[None])[0], self._matrix_shape(call)[2]
        return norms.norm_squared(partial(self.patches, call), columns, width, self.views(call), self.adding_up(call))

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        """`A = sum_n sum_t a a^T / N` `[I, I]`, mean over groups.

        "expand": divided by `N T`; "reduce": of `a` averaged over positions (Eschenhagen et al., arXiv:2311.00636).
        """
        if param != "weight":
            return None
        require_room(self._matrix_shape(call)[2], call.params["weight"])
        n, moment = call.batch_size, self.moment(call, approximation == "reduce")
        divisor = n * self.positions(call) if approximation == "expand" else n
        return moment / divisor if torch.is_grad_enabled() else moment.div_(divisor)

    def moment(self, call: Call, average: bool) -> Tensor:
        """`sum_n sum_t a a^T` `[I, I]`, mean over groups; of the mean over positions where `average`."""
        if (x := self.vectors(call)) is not None:
            return gemm.gram(wide(x).T, call.room((x.shape[1],) * 2, wide(x))).to(x.dtype)
        groups, _, width = self._matrix_shape(call)
        n, t = call.batch_size, self.positions(call)
        return gemm.second_moment(partial(self.patches, call), n, groups, width, t, call.inputs[0], average)

    def kron_input_diagonal(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        if param != "weight":
            return None
        x, n, average = self.vectors(call), call.batch_size, approximation == "reduce"
        if x is not None:
            return (wide(x).square().sum(0) / n).to(x.dtype)
        groups, _, width = self._matrix_shape(call)
        t = self.positions(call)
        moment = gemm.squares_of_patches(partial(self.patches, call), n, groups, width, t, call.inputs[0], average)
        return moment / (n * t if approximation == "expand" else n)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        """Rows whose Gram matrix is `G` `[G O, G O]`: positions summed, or one row for each ("expand")."""
        if approximation == "expand" and param == "weight":
            return self.as_columns(call, mat).movedim(-1, 2).flatten(3)  # [V, N, T, G O]
        return mat if self.vectors(call) is not None else self._over_positions(call, mat)

    def kron_output(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        def matrix(mat: Tensor, by_position: bool) -> Tensor:
            rows = wide(self.kron_rows(call, mat, param, approximation)).flatten(0, -2)
            return gemm.gram(rows.T, call.room((rows.shape[1],) * 2, rows)).to(mat.dtype)

        by_position = approximation == "expand" and param == "weight"
        if type(self).kron_rows is not Affine.kron_rows:
            return matrix(mat, by_position)
        found, known = call.of_columns(mat, by_position, matrix)  # that of the weight is that of the bias
        if not known:
            return found
        into = call.room(found.shape, found)  # each has its own
        return found.clone() if into is None else into.copy_(found)

    def kron_matrix(self, call: Call, rows: Tensor, param: str, outputs: int) -> Tensor:
        return self.as_matrix(call, rows).flatten(-3, -2)

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        """Columns and patches are projected, and not what they are multiplied to."""
        groups, _, width = self._matrix_shape(call)
        if groups > 1 or torch.is_grad_enabled():
            return None
        blocks = [self.as_columns(call, mat) for mat in mats]
        return norms.projected_squares(partial(self.patches, call), blocks, width, left, right)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`J^T M J`, the same for all samples; for weight and bias `G`, `M` summed over positions."""
        if wrt == 0 and len(call.inputs) == 1:
            return self._congruence_of_samples(call.subset([0]), matrix, 0)
        if isinstance(wrt, int):
            return super().congruence(call, matrix, wrt)
        if self.vectors(call) is not None:
            return matrix.clone()
        one, out = call.subset([0]), call.output.shape[1:]
        half = self._over_positions(one, matrix.reshape(len(matrix), 1, *out))[:, 0]  # [D, G O]
        return self._over_positions(one, half.T.reshape(half.shape[1], 1, *out))[:, 0]
