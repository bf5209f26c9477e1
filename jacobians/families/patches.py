"""Layers that multiply a weight with patches of their input: what such a layer declares, and products with Jacobians.

With groups `g`, output channels `o`, positions `t` and patches `a`,

    out[n, g, o, t] = sum_i W[g, o, i] a[n, g, i, t] + b[g, o].

A layer declares its patches, how its weight and output are seen in this form, and the products with
its input; everything that concerns weight and bias follows here and in `affine.py`, once.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.core import gemm
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.numeric import times_each
from bpk.jacobians.families.linear_in_each import LinearInEach


class WeightTimesPatches(LinearInEach):
    """Products with the Jacobians of "weight times patches, plus bias"."""

    # ---- what a layer declares -------------------------------------------------------------------
    @abstractmethod
    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        """The patches `a` of some samples: `[B, G, I, T]`."""

    @abstractmethod
    def as_columns(self, call: Call, mat: Tensor) -> Tensor:
        """See `[V, N, *out]` as `[V, N, G, O, T]`."""

    @abstractmethod
    def as_output(self, call: Call, columns: Tensor) -> Tensor:
        """See `[V, N, G, O, T]` (`T` may be 1: the same everywhere) as `[V, N, *out]`."""

    @abstractmethod
    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        """See weights `[..., *p]` as `[..., G, O, I]`."""

    @abstractmethod
    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        """See `[..., G, O, I]` as weights `[..., *p]`."""

    @abstractmethod
    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        """`[V, N, *in] -> [V, N, *out]`: the layer without bias."""

    @abstractmethod
    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        """`[V, N, *out] -> [V, N, *in]`."""

    # ---- what follows ----------------------------------------------------------------------------
    def weight_product(self, call: Call, mat: Tensor) -> Tensor:
        """`[V, *p] -> [V, N, *out]`."""
        return self.as_output(call, times_each(self.as_matrix(call, mat), self.patches(call)))

    def weight_adjoint(self, call: Call, mat: Tensor) -> Tensor:
        """`[V, N, *out] -> [V, *p]`, summed over samples."""
        columns = self.as_columns(call, mat)
        return self.as_weight(call, torch.einsum("vngot,ngit->vgoi", columns, self.patches(call)))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if isinstance(wrt, int):
            return self.input_product(call, mat, wrt)
        if wrt == "weight":
            return self.weight_product(call, mat)
        columns = mat.reshape(mat.shape[0], 1, self._matrix_shape(call)[0], -1, 1)
        return self.as_output(call, columns.expand(-1, call.batch_size, -1, -1, -1))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, int):
            return self.input_adjoint(call, mat, wrt)
        if wrt == "weight" and sum_batch:
            return self.weight_adjoint(call, mat)
        if wrt == "weight":
            columns, width = self.as_columns(call, mat), self._matrix_shape(call)[2]
            rows = gemm.per_sample(partial(self.patches, call), columns, width, call.empty, self.views(call))
            return self.as_weight(call, rows)
        rows = self._over_positions(call, mat)
        return rows.sum(1) if sum_batch else rows

    def views(self, call: Call) -> bool:
        """Whether patches are views of the input."""
        return False

    def vectors(self, call: Call) -> Tensor | None:
        """Patches as `[N, I]`, where there is one position and one group, and columns come as `[V, N, O]`."""
        return None

    def positions(self, call: Call) -> int:
        """`T`."""
        return call.output.shape[1:].numel() // max(1, self._matrix_shape(call)[:2].numel())

    def _matrix_shape(self, call: Call) -> torch.Size:
        return self.as_matrix(call, call.params["weight"]).shape

    def _over_positions(self, call: Call, mat: Tensor) -> Tensor:
        """Columns summed over positions: `[V, N, G O]`."""
        return self.as_columns(call, mat).sum(-1).flatten(2)
