"""Losses that couple the samples of a batch (contrastive ones, rankings), as losses of one sample: the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from bpk.jacobians.core.call import Options
from bpk.jacobians.core.nested import mapped
from bpk.jacobians.losses.loss import AutodiffLoss
from bpk.jacobians.losses.loss_call import Filled, filled


@dataclass(frozen=True)
class OfOneSample:
    """Options of a call whose tensors have an axis for the only sample, which the loss does not know."""

    options: Options

    def fill(self, inputs: Sequence[Tensor]) -> Filled:
        """Put tensors in their places, without that axis."""
        module, args, kwargs = filled(self.options, inputs)
        return module, *mapped((args, kwargs), lambda x: x[0] if isinstance(x, Tensor) else x)


class CoupledLoss(AutodiffLoss):
    """A loss as one of `[1, N, *pred]`, its other tensors with that axis, too: its Hessian is that of the whole batch.

    Args:
        rule: That of the loss.

    >>> import torch
    >>> from torch import nn
    >>> from bpk.jacobians.core.call import Call
    >>> class Ranking(nn.Module):
    ...     def forward(self, score):
    ...         return nn.functional.softplus(score[0] - score[1])
    >>> x = torch.zeros(1, 2)
    >>> CoupledLoss(AutodiffLoss()).sum_hessian(Call(Ranking(), (x,), {}, torch.tensor(0.0)))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """

    def __init__(self, rule: AutodiffLoss) -> None:
        super().__init__(predictions=rule.predictions, not_convex=rule.not_convex)
        self.rule = rule

    @staticmethod
    @cache
    def of(rule: AutodiffLoss) -> CoupledLoss:
        """That of a rule; the same each time, so that forms of graphs are known by it."""
        return CoupledLoss(rule)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return self.rule.forward(OfOneSample(options), inputs, params)
