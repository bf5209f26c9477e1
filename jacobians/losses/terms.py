"""Sums of the terms of a loss, with weights: `(loss(prediction, target) * weights).sum()`, with `reduction="none"`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache

from torch import Tensor

from bpk.jacobians.core.call import Call, Options, once
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.losses.flat import ZeroCurvature
from bpk.jacobians.losses.loss import AutodiffLoss, Loss
from bpk.jacobians.losses.loss_call import unknown_divisor
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy


class Weighted(Loss):
    """A loss that was given weights for its terms, as its last input."""

    def divides_by(self, call: Call) -> int | None:
        raise unknown_divisor()


class WeightedEntries(Weighted, PointwiseLoss):
    """The sum of the terms of a loss times weights `[N, *pred]`, which are a third input: `sum_i w_i l(x_i, t_i)`."""

    def __init__(self, rule: PointwiseLoss) -> None:
        own, chosen, draw = rule.weight, rule.choose, rule.draw

        def weight(call: Call) -> Tensor:
            weights, factor = wide(call.inputs[2]), None if own is None else own(call)
            return weights if factor is None else weights * factor

        super().__init__(rule.expressions, choose=chosen, weight=weight, draw=draw)

    @staticmethod
    @cache
    def of(rule: PointwiseLoss) -> WeightedEntries:
        """That of a rule; the same each time, so that forms of graphs are known by it."""
        return WeightedEntries(rule)

    def divisor(self, call: Call, count: int) -> int:
        return 1

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        each = copy.copy(options)
        each.reduction = "none"
        x, target, weights = inputs
        return (each(x, target) * weights).sum()


class WeightedTerms(SoftmaxCrossEntropy):
    """The sum of `-w_c log p_c` over all positions and classes, with weights of the logits' shape in place of targets.

    By what the weights were divided, they do not tell; a third input does, where that is known.
    """

    def divides_by(self, call: Call) -> Tensor | int | None:
        if len(call.inputs) > 2:
            return call.inputs[2]
        raise unknown_divisor()

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return super().forward(options, inputs[:2], params)


class WeightedPositions(Weighted, SoftmaxCrossEntropy):
    """The sum of the terms of a cross-entropy times weights `[N, *d]` of its positions, which are a third input."""

    def bends_down(self, call: Call) -> bool:
        return bool((self._softmax(call)[1] < 0).any())

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return (super().forward(options, inputs[:2], params) * inputs[2]).sum()

    @once
    def _softmax(self, call: Call) -> tuple[Tensor, Tensor]:
        log_p, weight = super()._softmax(call)
        return log_p, weight * call.inputs[2].to(log_p.dtype).reshape(weight.shape)


class OfTerms(Weighted):
    """The sum of the terms of a loss times weights `[N, *terms]`, which are the last input."""

    rule: Loss

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        *given, weights = inputs
        terms = self.rule.forward(options, given, params)
        if terms.shape != weights.shape:
            raise UnsupportedLayer(
                f"{self.rule.name} gives no terms of shape {list(weights.shape)}, as the loss has returned.",
                "its curvature would be that of another function.",
                "let its method forward() return what the loss does where reduction='none'.",
            )
        return (terms * weights).sum()


class SumOfTerms(OfTerms, AutodiffLoss):
    """That of any loss: its Hessian by autograd.

    Args:
        rule: That of the loss.

    >>> import torch
    >>> from torch import nn
    >>> loss, x, w = nn.SmoothL1Loss(reduction="none"), torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])
    >>> rule = SumOfTerms(AutodiffLoss())
    >>> rule.sum_hessian(Call(loss, (x, x, w), {}, torch.tensor(0.0)))
    tensor([[1., 0.],
            [0., 3.]])
    """

    def __init__(self, rule: Loss) -> None:
        super().__init__(predictions=rule.predictions, least_axes=rule.least_axes)
        self.rule = rule


class FlatTerms(OfTerms, ZeroCurvature):
    """That of a loss without curvature."""

    def __init__(self, rule: ZeroCurvature) -> None:
        assert rule.flat is not None
        super().__init__(rule.flat, predictions=rule.predictions, least_axes=rule.least_axes, adds_up=rule.adds_up)
        self.rule = rule


@cache
def of_terms(rule: Loss) -> OfTerms:
    """The same each time, so that forms of graphs are known by it."""
    return FlatTerms(rule) if isinstance(rule, ZeroCurvature) else SumOfTerms(rule)


OF_POSITIONS = WeightedPositions()


def sum_of_terms(rule: Loss, inputs: Sequence[Tensor], weights: Tensor) -> Loss:
    """The rule of the sum of a loss's terms times weights, which are given as its last input.

    That of a family is for one prediction, whose entries or positions have a term each.
    """
    shape, *others = [x.shape for x in inputs]
    if not any(x.requires_grad for x in inputs[1:]) and len(inputs) == 2:
        if type(rule) is PointwiseLoss and others == [weights.shape] == [shape]:
            return WeightedEntries.of(rule)
        if type(rule) is SoftmaxCrossEntropy and weights.shape == (*shape[:1], *shape[2:]):
            return OF_POSITIONS
    return of_terms(rule)
