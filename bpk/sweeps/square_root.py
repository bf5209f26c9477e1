"""The sweep of the GGN: a square root of the Hessian of the loss, at each call behind it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from bpk.jacobians.losses.loss import Loss
from bpk.sweeps.columns import ColumnSweep
from bpk.sweeps.sweeps import Step, apart, positive_scale


class SquareRoot(ColumnSweep):
    """`J^T S` with a square root `S` of the loss Hessian, exact or sampled: a square root of the GGN."""

    needs_root = True

    def __init__(self, mc_samples: int | None = None, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples)
        self.mc_samples = mc_samples

    @property
    def key(self) -> Hashable:
        return ("square root", self.mc_samples, self.samples)

    def start(self, step: Step, loss: Loss) -> None:
        scale, joint = positive_scale(step), step.joint(loss)
        if self.mc_samples is None:
            root = joint.rule.sqrt_hessian(joint.call)
            if step.samples_of_rows is not None:
                root = apart(root, step.samples_of_rows)
        else:
            root = joint.rule.sqrt_hessian_sampled(joint.call, self.mc_samples)
        for k, piece in enumerate(step.pieces(self.rows(root, 1) * scale.sqrt())):
            self.send_joint(step, joint, ("loss", id(step.record), k), piece, None)

    def rounds(self, step: Step, loss: Loss, columns: int | None) -> Iterator[None]:
        if columns is None or self.mc_samples is not None:
            self.start(step, loss)
            return
        scale, joint = positive_scale(step).sqrt(), step.joint(loss)
        parts = joint.rule.sqrt_hessian_parts(joint.call, columns)
        if step.samples_of_rows is not None:
            parts = iter(apart(joint.rule.sqrt_hessian(joint.call), step.samples_of_rows).split(columns))
        for j, part in enumerate(parts):
            if j:
                yield
            group = self.rows(part, 1) * scale if scale != 1 else self.rows(part, 1)
            del part
            for k, piece in enumerate(step.pieces(group)):
                self.send_joint(step, joint, ("loss", id(step.record), j, k), piece, None)
            del group, piece
