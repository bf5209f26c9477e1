"""Sums of clipped individual gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from bpk.extensions.firstorder.weighted_grad import WeightedGrad


class ClippedGrad(WeightedGrad):
    """The sum `[*p]` of clipped individual gradients, in the field `clipped_grad`.

    `clipped_grad = sum_n min(1, max_norm / norm_n) g_n` with the norm of sample `n`'s own loss, over all parameters;
    see `WeightedGrad`. Where the objective is a mean, this is the mean of clipped gradients, and a sample's share of it
    is `max_norm / N` at most.

    Args:
        max_norm: The clipping norm.
        per: `"sample"`: one norm over all parameters with a field; `"layer"`: each parameter is clipped by itself.
        loss_reduction: `"mean"` or `"sum"`: what the objective is of the samples' losses.
        subsampling: Indices of the samples considered (all by default).

    Source: Abadi et al. (2016), CCS, Deep learning with differential privacy.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(ClippedGrad(max_norm=0.5)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.clipped_grad.shape
    torch.Size([3, 4])
    """

    field = "clipped_grad"

    def __init__(
        self,
        max_norm: float = 1.0,
        per: str = "sample",
        loss_reduction: str = "mean",
        subsampling: Sequence[int] | None = None,
    ) -> None:
        several = isinstance(max_norm, Tensor) and max_norm.numel() != 1
        if several or not isinstance(max_norm, (Real, Tensor)) or not max_norm > 0:
            raise ValueError(f"max_norm must be a positive number, got {max_norm!r}.")
        self.max_norm: float = max_norm
        super().__init__(self.clip, per, loss_reduction, subsampling)

    def clip(self, norms: Tensor) -> Tensor:
        """`min(1, max_norm / norm)`."""
        if math.isinf(self.max_norm):
            return torch.ones_like(norms)
        return self.max_norm / norms.clamp(min=self.max_norm)


EXTENSIONS = (ClippedGrad,)
