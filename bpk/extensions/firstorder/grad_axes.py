"""Second moments of individual gradients along each axis of a parameter, for Shampoo and SOAP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.options import positive
from bpk.extensions.over_batches import Parts, Size, Sums
from bpk.fields.axes import axis_moments
from bpk.fields.statistics import Uses


class AxisSums(Sums):
    """Sums over samples of a matrix for each axis, by its number."""

    symmetric = True

    def whole(self, total: Parts, size: Size) -> Any:
        return [total[name] / self.weight(name, size) for name in sorted(total, key=int)]


class AxisGram(GradientExtension):
    """Second moments of the individual gradients along each axis, a list of matrices, in the field `axis_gram`.

    `axis_gram[k] = sum_n G_nk G_nk^T` `[d_k, d_k]`, where `G_nk` `[d_k, P / d_k]` is `grad_batch[n]` unfolded along
    axis `k`: for a matrix, `sum_n g_n g_n^T` and `sum_n g_n^T g_n`. Individual gradients exist a few at a time, and not
    at all where inputs and output gradients of a linear layer give the sums.

    Args:
        max_size: Axes that are longer have the diagonal `[d_k]`.
        subsampling: Indices of the samples considered (all by default).

    Source: Gupta, Koren, Singer (2018), Shampoo, arXiv:1802.09568; Vyas et al. (2024), SOAP, arXiv:2409.11321.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(AxisGram()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(matrix.shape) for matrix in model.weight.axis_gram]
    [(3, 3), (4, 4)]
    """

    field = "axis_gram"
    form = Form.AXES
    adds_field = False
    over_batches = AxisSums(power=2)

    def __init__(self, max_size: int = 4096, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(subsampling)
        self.max_size = positive("max_size", max_size)

    def value(self, uses: Uses) -> list[Tensor]:
        return [matrix.to(uses.param.dtype) for matrix in axis_moments(uses, self.max_size)]

    def statistic(self, uses: Uses) -> Parts:
        return {str(axis): matrix for axis, matrix in enumerate(axis_moments(uses, self.max_size))}

    def definition(self, plain: PlainAutograd) -> Tensor:
        shape = plain.vector.shape or torch.Size([1])
        found = []
        for axis, size in enumerate(shape):
            rows = plain.gradients.unflatten(1, shape).movedim(axis + 1, 1).reshape(-1, size, shape.numel() // size)
            whole = torch.einsum("nai,nbi->ab", rows, rows)
            found.append(whole.flatten() if size <= self.max_size else whole.diagonal())
        return torch.cat(found)


EXTENSIONS = (AxisGram,)
