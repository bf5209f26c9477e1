"""The sweep of KFRA: a matrix, averaged over the batch, travels backwards along a chain of layers."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from bpk.graph import Source
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.jacobians.loss import Loss
from bpk.jacobians.rule import add_up
from bpk.records import Record
from bpk.sweeps import Step, Sweep, matched, positive_scale


class Averaged(Sweep):
    """The recursion of KFRA: `G <- mean_n J_n^T G J_n`, a matrix `[D, D]` over the entries of one sample.

    Starts with the sum over samples of the loss Hessian (Botev, Ritter, Barber, 2017), or of its sampled square.
    """

    def __init__(self, mc_samples: int | None = None, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples)
        self.mc_samples = mc_samples

    @property
    def key(self) -> Hashable:
        return ("averaged", self.mc_samples, self.samples)

    def start(self, step: Step, loss: Loss) -> None:
        scale = positive_scale(step)
        if self.mc_samples is not None or self.samples is not None:
            exact = self.mc_samples is None
            root = loss.sqrt_hessian(step.full) if exact else loss.sqrt_hessian_sampled(step.full, self.mc_samples or 1)
            flat = self.rows(root, 1).flatten(2).flatten(0, 1)
            matrix = flat.T @ flat
        else:
            matrix = loss.sum_hessian(step.full)
        self.send(step, step.sources[0], id(step.record), matrix * scale)

    def hand_over(self, record: Record) -> Tensor:
        return add_up(list(self.waiting[id(record)].values()))

    def visit(self, step: Step) -> Tensor:
        matrices: dict[int, Tensor] = self.arrived(step)
        if len(step.sources) > 1 or step.samples_of_rows is not None:
            raise branching(step)
        for birth, matrix in matrices.items():
            matrix = matrices[birth] = matched(matrix, step.full)
            for index, source in step.sources.items():
                self.send(step, source, birth, step.rule.congruence(step.call, matrix, index))
        return add_up(list(matrices.values()))

    def send(self, step: Step, source: Source, birth: int, matrix: Tensor) -> None:
        """Hand the matrix to the call that produced the input; those of several losses add up."""
        record = source.targets[0][0]
        arrived: dict[int, Tensor] = self.waiting.setdefault(id(record), {})
        if len(source.targets) > 1 or birth in arrived:
            raise branching(step)
        if source.stretch is not None:
            matrix = self.through_stretch(source, step.full.inputs[0].shape, matrix)
        arrived[birth] = matrix

    def through_stretch(self, source: Source, shape: torch.Size, matrix: Tensor) -> Tensor:
        """`mean_n J_n^T M J_n` for plain autograd between two calls, multiplying from both sides."""
        columns = matrix.reshape(-1, 1, *shape[1:]).expand(-1, *shape)
        half = source.pull(columns)[0][1].flatten(2)  # [D, N, D_target]
        both = source.pull(half.permute(2, 1, 0).reshape(-1, *shape))[0][1].flatten(2)
        return self.rows(both, 1).mean(1)


def branching(step: Step) -> UnsupportedLayer:
    """The averaged recursion is defined along a chain of layers only."""
    return UnsupportedLayer(
        explain(
            f"KFRA cannot pass '{step.record.path}' ({type(step.record.module).__name__}).",
            "its averaged recursion is defined along a chain of layers; here branches meet, or functions join or "
            "split samples between the layers.",
            "use KFLR or KFAC, which hold on any graph.",
        )
    )
