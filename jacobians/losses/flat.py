"""Losses without curvature: (piecewise) linear in their predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.products import Residual
from bpk.jacobians.losses.curvature import Curvature
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.losses.softmax import divisor


class ZeroCurvature(Loss):
    """A loss whose Hessian is zero (almost) everywhere: (piecewise) linear in its `predictions`, jointly.

    Its factors have one column, of zeros (NaN where the prediction is NaN). `why` ends up in a warning; `adds_up` gives
    the `positions`.
    """

    def __init__(
        self,
        why: str,
        *modules: type[nn.Module],
        examples: Sequence[Example] = (),
        least_axes: int = 1,
        predictions: tuple[int, ...] = (0,),
        adds_up: Callable[[Tensor], tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(*modules, examples=examples)
        self.adds_up = adds_up
        self.flat = why
        self.least_axes = least_axes
        self.predictions = predictions

    def divides_by(self, call: Call) -> Tensor | int | None:
        by_class = isinstance(call.options, nn.NLLLoss) and call.options.reduction == "mean"
        return divisor(call) if by_class else super().divides_by(call)

    def together(self, wrts: tuple[int, ...]) -> Curvature:
        return self if set(wrts) <= set(self.predictions) else super().together(wrts)

    def positions(self, prediction: Tensor) -> tuple[int, ...]:
        return super().positions(prediction) if self.adds_up is None else self.adds_up(prediction)

    def sqrt_hessian(self, call: Call) -> Tensor:
        return self._zeros(call)[None]

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        return self._zeros(call).expand(mc_samples, *call.inputs[0].shape)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return self._zeros(call).expand_as(mat)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO

    def _zeros(self, call: Call) -> Tensor:
        x = call.inputs[0]
        return torch.where(x.isnan(), x, 0.0)
