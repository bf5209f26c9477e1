"""The sweeps of the GGN: square roots of the Hessian of the loss, of the identity in its place, and sums of columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from bpk.plan.samples.rows import along_rows
from bpk.plan.step import Step
from bpk.sweeps.columns.column_sweep import ColumnSweep
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, StartingColumns, as_lazy, split_rows
from bpk.sweeps.sweep import positive_factor, times_root_of_factor


class SquareRoot(ColumnSweep):
    """`J^T S` with a square root `S` of the loss Hessian, exact or sampled: a square root of the GGN."""

    needs_root = True

    def __init__(self, mc_samples: int | None = None, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples, mc_samples)
        self.mc_samples = mc_samples

    def at_loss(self, step: Step) -> list[StartingColumns]:
        exact = self.mc_samples is None and step.samples_of_rows is None
        columns = RootColumns(self, step) if exact else self.all_at_once(step)
        self.in_all = columns.count
        return [columns]

    def may_be_closed(self, step: Step) -> bool:
        """Whether nobody wants exact columns themselves."""
        return "columns" not in self.takes and self.mc_samples is None and positive_factor(step) >= 0

    def all_at_once(self, step: Step) -> LazyColumns:
        """All columns of a loss: sampled ones, or exact ones with columns of their own for each row of a sample."""
        if self.mc_samples is not None:
            return as_lazy(self.at_inputs(step, self.sampled(step, self.mc_samples)), None, "loss")
        assert step.samples_of_rows is not None
        entries = step.joint.call.inputs[0].shape[1:].numel()
        columns = as_lazy({0: torch.cat(list(self.parts(step, max(1, entries))))}, None, "loss")
        rows = split_rows(columns, step.samples_of_rows, step.batch_size)
        return rows.mapped(lambda chunk: (self.at_inputs(step, chunk[0][0]), None))

    def parts(self, step: Step, size: int) -> Iterator[Tensor]:
        """Exact columns of the predictions of a loss, so many at a time."""
        return step.joint.rule.sqrt_hessian_parts(step.joint.call, size)

    def sampled(self, step: Step, count: int) -> Tensor:
        """So many random columns."""
        return step.joint.rule.sqrt_hessian_sampled(step.joint.call, count)

    def scaled(self, mat: Tensor, step: Step) -> Tensor:
        """Columns times the root of the factor of the loss."""
        return times_root_of_factor(mat, step)

    def at_inputs(self, step: Step, root: Tensor) -> dict[int | str, Tensor]:
        """Columns of the predictions of a loss, side by side, by input, scaled."""
        if self.samples is not None:
            terms = self.terms(step)
            root = self.rows(root, 1) if terms is None else root * along_rows(terms.sqrt(), root, 1)
        return dict(step.joint.split(self.scaled(root, step)).items())


class RootColumns(StartingColumns):
    """The columns of an exact square root, which the loss makes in parts."""

    name = "loss"

    def __init__(self, sweep: SquareRoot, step: Step) -> None:
        self.count = step.joint.call.inputs[0][:1].numel()
        self.sweep = sweep
        self.step = step

    def chunks(self, size: int) -> Iterator[Chunk]:
        for part in self.sweep.parts(self.step, size):
            yield self.sweep.at_inputs(self.step, part), None


class Outputs(SquareRoot):
    """`J^T S` with `S S^T = I`, or on average: the Jacobian of what losses take, whatever they are."""

    needs_root = False
    of_loss_hessian = False

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


def columns_at(key: Hashable) -> slice:
    """Which of the `K` columns have begun at a place."""
    assert isinstance(key, tuple) and isinstance(key[0], range), "columns of a weighted root"
    return slice(key[0].start, key[0].stop)


class WeightedRoot(SquareRoot):
    """`sum_v w_kv s_v`, for weights `[K, V, N]` of the columns of all losses, in the order in which these are reached.

    The key of a block says which of the `K` columns it has: `range(start, stop)`.
    """

    before = 0

    def __init__(self, weights: Tensor, mc_samples: int | None = None) -> None:
        super().__init__(mc_samples)
        self.weights = weights
        self.key = (self.key, id(weights))

    def at_loss(self, step: Step) -> list[StartingColumns]:
        sums: dict[int | str, Tensor] = {}
        for lazy in super().at_loss(step):
            for mats, _ in lazy.chunks(self.chunk):
                here = self.weights[:, self.before : self.before + len(next(iter(mats.values())))]
                self.before += here.shape[1]
                for wrt, mat in mats.items():
                    rows = step.samples_of_rows if isinstance(wrt, int) else None
                    weights = here if rows is None else here[:, :, rows]
                    part = torch.einsum("kvn,vn...->kn...", weights.to(mat.dtype), mat)
                    sums[wrt] = sums[wrt] + part if wrt in sums else part
        size, count = self.chunk, len(self.weights) if sums else 0
        parts = [range(k, min(k + size, count)) for k in range(0, count, size)]
        return [as_lazy({wrt: mat[p.start : p.stop] for wrt, mat in sums.items()}, None, p) for p in parts]
