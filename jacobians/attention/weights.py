"""Weights of linear layers that live inside a larger layer: individual gradients, their squares, Kronecker factors.

The larger layer says what each of its weights multiplies, and pulls columns to the output of these linear layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.core import gemm
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.numeric import linear
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.families import sequences
from bpk.jacobians.families.several import SeveralOutputs


class LinearInside(SeveralOutputs):
    """A layer some of whose weights stand for linear layers `y = x W^T`, or for several whose rows are stacked.

    Factors of a weight are those of a linear layer: `G` is the GGN of a bias added to `y` (positions summed before the
    outer product), `A = sum_n sum_t x x^T / N`, averaged over what is stacked (as over groups of a convolution).
    "expand" has a row for each position (those of stacked layers side by side, shorter ones padded with zeros) and
    divides by `N T`; "reduce" averages over positions first.
    """

    @abstractmethod
    def operands(self, call: Call, param: str) -> list[Tensor]:
        """What a weight multiplies, `[N, T, I]` for each of the stacked layers; nothing where it is no weight."""

    @abstractmethod
    def columns(self, call: Call, mat: Tensor, param: str) -> list[Tensor]:
        """Columns `[V, N, T, O]` at the outputs of these layers."""

    @abstractmethod
    def vectors(self, call: Call, mat: Tensor, param: str) -> Tensor:
        """Columns `[V, N, *p]` of a parameter that is no weight."""

    # ---- rows ----------------------------------------------------------------------------------------
    def param_products(self, call: Call, mat: Tensor, param: str, sum_batch: bool) -> Tensor:
        """Parameter products: `[V, *p]`, or `[V, N, *p]` where `sum_batch` is false."""
        inputs = self.operands(call, param)
        if not inputs:
            rows = self.vectors(call, mat, param)
            return rows.sum(1) if sum_batch else rows
        pairs = list(zip(self.columns(call, mat, param), inputs, strict=True))
        if sum_batch:
            return concatenated([sequences.summed(m, x) for m, x in pairs], 1)
        empty = call.empty if len(pairs) == 1 else gemm.fresh
        return concatenated([sequences.per_sample(m, x, empty) for m, x in pairs], 2)

    # ---- shortcuts -------------------------------------------------------------------------------------
    def has_cheap_squares(self, call: Call, param: str) -> bool:
        return not self.operands(call, param)

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        inputs = self.operands(call, param)
        if torch.is_grad_enabled() or not inputs:
            return super().squared_sum(call, mat, param, weights, per_sample)
        empty = call.empty if len(inputs) == 1 else gemm.fresh
        pairs = zip(self.columns(call, mat, param), inputs, strict=True)
        return concatenated([sequences.squared_sum(m, x, weights, per_sample, empty) for m, x in pairs], -2)

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        inputs, found, start = self.operands(call, param), list[Outer](), 0
        for m, x in zip(self.columns(call, mat, param) if inputs else (), inputs, strict=True):
            found.append(sequences.outer(m, x, slice(start, start + m.shape[3])))
            start += m.shape[3]
        return found

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        inputs = self.operands(call, param)
        if not inputs:
            return super().norm_squared(call, grad_out, param)
        pairs = zip(self.columns(call, grad_out[None], param), inputs, strict=True)
        return add_up([sequences.norm_squared(m[0], x) for m, x in pairs])

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        inputs, n = self.operands(call, param), call.batch_size
        moments = []
        for x in inputs:
            t, width = x.shape[1:]
            moment = gemm.second_moment(sequences.patches(x), n, 1, width, t, x, approximation == "reduce")
            moments.append(moment / (n * t * len(inputs) if approximation == "expand" else n * len(inputs)))
        return add_up(moments) if moments else None

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        if not self.operands(call, param):
            return self.vectors(call, mat, param).flatten(2)
        parts = self.columns(call, mat, param)
        if approximation != "expand":
            return concatenated([m.sum(2) for m in parts], 2)
        longest = max(m.shape[2] for m in parts)
        return concatenated([torch.nn.functional.pad(m, (0, 0, 0, longest - m.shape[2])) for m in parts], 3)

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        """Of one layer, or of several: the positions of all of them, with columns that are projected before."""
        inputs = self.operands(call, param)
        if not inputs or torch.is_grad_enabled() or (left is None and len(inputs) > 1):
            return None
        if left is None or len(inputs) == 1:
            return sequences.projected_squares([self.columns(call, m, param)[0] for m in mats], inputs[0], left, right)
        blocks = []
        for mat in mats:
            parts = self.columns(call, mat, param)
            bases = left.split([m.shape[3] for m in parts])
            blocks.append(torch.cat([linear(m, basis.T.to(m.dtype)) for m, basis in zip(parts, bases, strict=True)], 2))
        return sequences.projected_squares(blocks, torch.cat(inputs, 1), None, right)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """For a weight, of the bias that its factor `G` belongs to."""
        if isinstance(wrt, int) or not self.operands(call, wrt):
            return super().congruence(call, matrix, wrt)
        total = []
        for n in range(call.batch_size):
            one = call.subset([n])
            half = self.kron_rows(one, matrix.reshape(-1, *one.output.shape), wrt)[:, 0]  # M J: [D_out, O]
            total.append(self.kron_rows(one, half.T.reshape(-1, *one.output.shape), wrt)[:, 0])
        return add_up(total) / call.batch_size
