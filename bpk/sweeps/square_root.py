"""The sweep of the GGN: a square root of the Hessian of the loss, at each call behind it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import Tensor

from bpk.plan.step import Step
from bpk.sweeps.columns import ColumnSweep
from bpk.sweeps.lazy import Chunk, LazyColumns, Starting, known, split_rows
from bpk.sweeps.sweep import times_root_of_factor


class SquareRoot(ColumnSweep):
    """`J^T S` with a square root `S` of the loss Hessian, exact or sampled: a square root of the GGN."""

    needs_root = True

    def __init__(self, mc_samples: int | None = None, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples)
        self.mc_samples = mc_samples

    @property
    def key(self) -> Hashable:
        return ("square root", self.mc_samples, self.samples)

    def starting(self, step: Step) -> list[Starting]:
        if not step.is_loss:
            return []
        if self.mc_samples is None and step.samples_of_rows is None:
            return [RootColumns(self, step)]
        return [self.all_at_once(step)]

    def all_at_once(self, step: Step) -> LazyColumns:
        """All columns of a loss: sampled ones, or exact ones with columns of their own for each row of a sample."""
        joint = step.joint
        if self.mc_samples is not None:
            return known(
                self.at_inputs(step, joint.rule.sqrt_hessian_sampled(joint.call, self.mc_samples)), None, "loss"
            )
        assert step.samples_of_rows is not None
        columns = known({0: joint.rule.sqrt_hessian(joint.call)}, None, "loss")
        rows = split_rows(columns, step.samples_of_rows, step.batch_size)
        return rows.mapped(lambda chunk: (self.at_inputs(step, chunk[0][0]), None))

    def at_inputs(self, step: Step, root: Tensor) -> dict[int | str, Tensor]:
        """Columns of the predictions of a loss, side by side, by input, times the root of its factor."""
        terms = self.terms(step)
        mat = self.rows(root, 1) if terms is None else root * terms.sqrt().reshape(-1, *[1] * (root.dim() - 2))
        return dict(step.joint.split(times_root_of_factor(mat, step)).items())


class RootColumns(Starting):
    """The columns of an exact square root, which the loss makes in parts."""

    name = "loss"

    def __init__(self, sweep: SquareRoot, step: Step) -> None:
        self.count = step.joint.call.inputs[0][:1].numel()
        self.sweep = sweep
        self.step = step

    def chunks(self, size: int) -> Iterator[Chunk]:
        joint = self.step.joint
        for part in joint.rule.sqrt_hessian_parts(joint.call, size):
            yield self.sweep.at_inputs(self.step, part), None
