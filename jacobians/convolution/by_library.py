"""Individual gradients of a convolution's weight by the library's own gradient, one sample after the other.

Products with patches write every input as often as a kernel reads it. Where there are many positions and few output
channels, this takes longer than the products; oneDNN convolves without it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.numeric import ONE_BY_ONE, can_take_onednn
from bpk.jacobians.families.affine import Affine

MANY = 128
"""Positions from which on it may pay. `python -m benchmarks.convolution_choices` tells how much time is lost so."""


class ByLibrary(Affine):
    """Weight times patches, for single columns that come to many positions."""

    @abstractmethod
    def gradient(self, call: Call, mat: Tensor, x: Tensor) -> Tensor:
        """The gradient `[*p]` of the weight, for some samples of a column, and of the input."""

    def one_by_one(self, call: Call, mats: Sequence[Tensor]) -> Iterator[Tensor] | None:
        """The gradient `[*p]` of each sample, or `None` where products with patches are faster, or as fast."""
        x, single = call.inputs[0], len(mats) == len(mats[0]) == 1
        if not (single and self.is_faster(call) and can_take_onednn(x, mats[0], call.params["weight"])):
            return None
        return (self.gradient(call, mats[0][0, n : n + 1], x[n : n + 1]) for n in range(len(x)))

    def is_faster(self, call: Call) -> bool:
        """Whether this is faster for a single column: many positions, few output channels, and no very few inputs."""
        weight, positions = call.params["weight"], call.output.shape[2:].numel()
        outputs, inputs = weight.shape[:2]
        if call.options.groups > 1 or 16 < 4 * inputs <= outputs or positions * weight.numel() < ONE_BY_ONE:
            return False
        return positions >= max(MANY, (2 if positions >= 2 * MANY else 4) * outputs)

    def shown_sums(self, call: Call, rows: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same, added up where somebody wants their sum."""
        add = call.summing("weight")
        for n, row in enumerate(rows):
            if add is not None:
                add(row if n else row.clone())
            yield row

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        rows = self.one_by_one(call, [mat]) if wrt == "weight" and not sum_batch else None
        if rows is None:
            return super().jac_t_mat_prod(call, mat, wrt, sum_batch)
        out = call.empty((1, call.batch_size, *call.params["weight"].shape), mat)
        for goal, row in zip(out[0], rows, strict=True):
            goal.copy_(row)
        return out

    def _squares(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor:
        rows, shape = self.one_by_one(call, mats) if param == "weight" else None, call.params["weight"].shape
        if rows is None:
            return super()._squares(call, mats, param, weights, per_sample)
        factors = [1.0] * call.batch_size if weights is None else weights[0].tolist()
        total = call.empty((call.batch_size, *shape) if per_sample else shape, mats[0]).zero_()
        for n, (row, factor) in enumerate(zip(self.shown_sums(call, rows), factors, strict=True)):
            (total[n] if per_sample else total).addcmul_(row, row, value=factor)
        return total

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        rows = self.one_by_one(call, [grad_out[None]]) if param == "weight" else None
        if rows is None:
            return super().norm_squared(call, grad_out, param)
        return torch.stack([torch.linalg.vector_norm(row) for row in self.shown_sums(call, rows)]).square()


def weight_gradient(
    m: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    rest: Sequence[int] | None,
    groups: int,
) -> Tensor:
    """The library's own weight gradient, summed over samples (`rest`: output padding of a transposed one)."""
    more = [0] * len(stride) if rest is None else rest
    wanted = (False, True, False)
    return torch.ops.aten.convolution_backward(
        m, x, weight, None, stride, padding, dilation, rest is not None, more, groups, wanted
    )[1]
