"""The sweep of the outputs themselves: unit vectors, or random signs, in place of a square root of the loss Hessian."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from bpk.plan.step import Step
from bpk.sweeps.starts.square_root import SquareRoot


class Outputs(SquareRoot):
    """`J^T S` with `S S^T = I`, or on average: the Jacobian of what losses take, whatever they are."""

    needs_root = False
    of_loss_hessian = False

    @property
    def key(self) -> Hashable:
        return ("outputs", self.mc_samples, self.samples)

    def parts(self, step: Step, size: int) -> Iterator[Tensor]:
        x = step.joint.call.inputs[0]
        for numbers in torch.arange(x.shape[1:].numel(), device=x.device).split(max(1, size)):
            units = x.new_zeros(len(numbers), *x.shape).flatten(2) if x.dim() > 1 else x.new_zeros(1, len(x), 1)
            units[torch.arange(len(numbers), device=x.device), :, numbers] = 1.0
            yield units.view(len(numbers), *x.shape)

    def sampled(self, step: Step, count: int) -> Tensor:
        return random_signs(step.joint.call.inputs[0], count)

    def scaled(self, mat: Tensor, step: Step) -> Tensor:
        return mat


def random_signs(prediction: Tensor, count: int) -> Tensor:
    """Columns `[M, N, *prediction]` of signs, scaled by `1/sqrt(M)`, whose outer products have the mean `I`."""
    signs = torch.randint(2, (count, *prediction.shape), device=prediction.device).to(prediction.dtype)
    return (2 * signs - 1) / count**0.5
