"""Columns of single tokens: the gradient, or a square root, of each term that the loss adds up for a sample.

A token is a row of the prediction, or a position in it, where the loss adds up a term for each (`Curvature.positions`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from bpk.fields.tokens import Tokens
from bpk.plan.samples.rows import along_rows, slots
from bpk.plan.step import Step
from bpk.sweeps.columns.column_sweep import ColumnSweep
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, StartingColumns
from bpk.sweeps.starts.square_root import SquareRoot

AT_ONCE = 1 << 19
"""How many numbers columns of tokens have at the largest layer, on a processor: there are many, each is for itself, and
few take no more time than all at once, and less memory. Where fields are rows, these are what takes memory."""


def numbered(step: Step) -> tuple[Tensor, int]:
    """The number of each entry's token `[R, *prediction]` among those of its sample, and how many there are at most.

    They are the positions of each row, one row after the other.
    """
    x, rule, rows = step.joint.call.inputs[0], step.joint.rule, step.samples_of_rows
    axes = rule.positions(x)
    sizes = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    count = prod(sizes)
    number = torch.arange(count, device=x.device).reshape(sizes).expand(x.shape)
    if rows is not None and len(rows):
        slot = slots(rows)
        number = number + count * along_rows(slot, x)
        count *= int(slot.max()) + 1
    return number, count


class TokenColumns(ColumnSweep):
    """Columns that are zero at all tokens of a sample but one.

    `columns` gives those of all tokens on top of each other. Those of some tokens begin together, in order; their key
    says of which `Tokens` they are, also at a parameter. Tokens of a second loss are numbered after those of the first.
    """

    before = 0

    def prepare(self) -> None:
        if self.at_most is not None and not self.fields_are_rows and self.plan.on_processor:
            self.at_most = min(self.at_most, max(1, AT_ONCE // self.plan.largest))
        super().prepare()

    @abstractmethod
    def columns(self, step: Step) -> Tensor:
        """`[K, R, *prediction]` of a loss."""

    @abstractmethod
    def at_inputs(self, step: Step, mat: Tensor) -> dict[int | str, Tensor]:
        """Columns of a loss, times its factor in the objective, by input."""

    def may_be_closed(self, step: Step) -> bool:
        return False  # also of a square root: columns tell tokens apart

    def no_entries(self, loss: Step) -> list[StartingColumns]:
        (zeros,) = super().no_entries(loss)
        assert isinstance(zeros, LazyColumns)
        return [replace(zeros, name=Tokens(self.before - numbered(loss)[1], self.before))]

    def at_loss(self, step: Step) -> list[StartingColumns]:
        columns, (number, count) = self.columns(step), numbered(step)
        each = max(1, self.chunk // max(1, len(columns)))
        starts = range(0, count, each)
        found: list[StartingColumns] = [self.some(step, columns, number, k, min(k + each, count)) for k in starts]
        self.before += count
        return found

    def some(self, step: Step, columns: Tensor, number: Tensor, first: int, last: int) -> LazyColumns:
        """The columns of some tokens, one token after the other."""
        k = len(columns)

        def make(start: int, stop: int) -> Chunk:
            here = torch.arange(start, stop, device=columns.device)
            mine = number == (first + here // k).reshape(-1, *[1] * number.dim())
            return self.at_inputs(step, torch.where(mine, columns[here % k], 0.0)), None

        return LazyColumns((last - first) * k, make, Tokens(self.before + first, self.before + last))


class TokenGradient(TokenColumns):
    """The gradient of each token's loss."""

    of_loss_hessian = False

    def columns(self, step: Step) -> Tensor:
        joint = step.joint
        return joint.rule.jac_t_mat_prod(joint.call, joint.call.inputs[0].new_ones(1))

    def at_inputs(self, step: Step, mat: Tensor) -> dict[int | str, Tensor]:
        return {k: part * step.grad.to(part.dtype) for k, part in step.joint.split(self.rows(mat, 1)).items()}


class TokenRoot(TokenColumns, SquareRoot):
    """A square root of the Hessian of each token's loss, exact or sampled."""

    def columns(self, step: Step) -> Tensor:
        rule, call = step.joint.rule, step.joint.call
        if self.mc_samples is not None:
            return rule.sqrt_hessian_sampled(call, self.mc_samples)
        root = rule.sqrt_hessian_by_position(call)
        return rule.sqrt_hessian(call) if root is None else root

    def at_inputs(self, step: Step, mat: Tensor) -> dict[int | str, Tensor]:
        return SquareRoot.at_inputs(self, step, mat)
