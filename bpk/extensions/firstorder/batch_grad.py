"""Individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.extensions.firstorder.base import GradientExtension
from bpk.statistics import Uses


class BatchGrad(GradientExtension):
    """Individual gradients `[N, *p]` in the field `grad_batch`.

    Row `n` is the gradient of sample `n`'s share of the loss: with `reduction="mean"` that of
    `loss_n / N`, so that `grad_batch.sum(0) == grad`.

    Args:
        subsampling: Indices of the samples considered (all by default).
    """

    needs_rows = True

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("grad_batch", subsampling=subsampling)

    def value(self, uses: Uses) -> Tensor:
        return uses.all_rows()[0]
