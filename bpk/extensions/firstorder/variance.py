"""Variance of individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.extensions.firstorder.base import GradientExtension
from bpk.statistics import Uses


class Variance(GradientExtension):
    """Elementwise biased variance `[*p]` of the individual gradients, in the field `variance`.

    `variance = sum_n g_n^2 / N - (sum_n g_n / N)^2` with the scaled individual gradients `g_n` of `BatchGrad`.

    Args:
        subsampling: Indices of the samples in the sums (all by default); `N` stays the full batch's.

    Source: Dangel, Kunstner, Hennig (2020), BackPACK, section 2.2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(Variance()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.variance.shape, bool((model.weight.variance >= 0).all())
    (torch.Size([3, 4]), True)
    """

    needs_gradient = True

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("variance", subsampling=subsampling)

    def value(self, uses: Uses) -> Tensor:
        n = uses.batch_size
        total, squares = uses.summed(), uses.squared_sum() / n
        if torch.is_grad_enabled():
            return (squares - (total / n).square()).clamp(min=0)
        return squares.addcmul_(total, total, value=-1 / n**2).clamp_(min=0)
