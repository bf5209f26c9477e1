"""Columns that travel from call to call by the transposed Jacobians: `U <- J^T U`, in chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch

from bpk.plan.step import Step
from bpk.sweeps.columns.closed_form import settle_last_layer
from bpk.sweeps.columns.deposits import Deposits
from bpk.sweeps.columns.lazy import LazyColumns, StartingColumns, as_lazy
from bpk.sweeps.columns.merging import Merging
from bpk.sweeps.columns.run import Run, Travelling


class ColumnSweep(Travelling):
    """Columns that begin at some calls, pass all calls behind these, and are summed up at parameters.

    Subclasses say where columns begin. Before columns become too many, those under way go to the end of the plan, and
    others start afterwards. A sweep that `merges` makes fewer signed columns of many on the way.
    """

    merges = False

    @abstractmethod
    def at_loss(self, step: Step) -> list[StartingColumns]:
        """The columns that begin at the inputs of a loss."""

    def on_the_way(self, step: Step) -> list[StartingColumns]:
        """Those that begin at another call: at its inputs, and at parameters that it uses."""
        return []

    def may_be_closed(self, step: Step) -> bool:
        """Whether a diagonal may take the place of the columns of a loss, if one layer alone is behind it."""
        return False

    def prepare(self) -> None:
        self.run = Run(self)
        plain = self.module_extensions is None and not torch.is_grad_enabled()
        self.deposits = Deposits(Merging(self.plan, self.at_most)) if self.merges and plain else None
        self.may_be_brought = plain and not self.merges and self.samples is None

    def end(self) -> None:
        self.__dict__.pop("run", None)

    def visit(self, step: Step) -> None:
        starting = self.begin_at(step) if step.is_loss else self.on_the_way(step)
        if self.deposits is not None:
            if self.deposits.before:
                self.withdraw(step, self.deposits)
            self.run.merge(step, self.deposits.merging)
        if starting:
            self.start(step, starting)
        else:
            self.run.visit(step)
        if self.run.uses:
            self.settle_last(self.run.uses, step)

    def begin_at(self, loss: Step) -> list[StartingColumns]:
        """The columns of a loss, if its last layer needs them."""
        loss.reached = True
        written = self.module_extensions
        if written is not None and written.serves(loss):
            n = -1 if self.samples is not None else loss.batch_size
            shapes = {index: (-1, n, *loss.call.inputs[index].shape[1:]) for index in loss.links}
            return [as_lazy(written.pass_tensors(loss, None, shapes), None, "loss")]
        if not loss.links or (self.may_be_closed(loss) and settle_last_layer(self, loss)):
            return []
        starting = self.at_loss(loss)
        found = [lazy for lazy in starting if lazy.count or not isinstance(lazy, LazyColumns)]
        if found or any(loss.call.inputs[index].numel() for index in loss.links):
            return starting
        return self.no_entries(loss)

    def start(self, step: Step, starting: Iterable[StartingColumns]) -> None:
        """Let columns begin at a call, behind those that pass it."""
        left = sum([lazy.count for lazy in starting])
        alone = left == 1 and step.is_loss and self.may_be_brought
        self.make_room(step.number, left, step)
        self.run.visit(step, last=False)
        for lazy in starting:
            for number, chunk in enumerate(lazy.chunks(self.chunk)):
                count = next(iter(chunk[0].values())).shape[0]
                if self.run.count and self.is_too_much(self.run.count + count):
                    self.settle_last(self.run.uses, step)
                    self.make_room(step.number + 1, left, step)
                left -= count
                self.run.start(step, (lazy.name, self.plan.key, step.number, number), chunk, alone)

    def no_entries(self, loss: Step) -> list[StartingColumns]:
        """A column of zeros, where predictions have no entries: what is behind the loss is to know of it."""
        inputs = loss.view(self.samples).inputs
        return [as_lazy({index: torch.zeros_like(inputs[index])[None] for index in loss.links}, None, "no entries")]

    def withdraw(self, step: Step, deposits: Deposits) -> None:
        """What has been added up before a step goes on, with the columns that have come here since."""
        if step in deposits.before and deposits.take(self.run.waiting, self.run.uses, step, self.run.count):
            self.run = Run(self)
        for number, (places, mats, signs, left) in enumerate(deposits.withdraw(step, self.chunk)):
            self.make_room(step.number, left, step)
            self.run.resume(places, ("deposit", self.plan.key, step.number, number), mats, signs)

    def make_room(self, number: int, count: int, here: Step) -> None:
        """If so many more are too many, columns go ahead, from step `number` on: to be added up, or to the end."""
        run = self.run
        if count and run.count and self.is_too_much(run.count + min(count, self.chunk)):
            for step in self.plan.steps[number:]:
                if step.runs:
                    if self.deposits is not None:
                        if step is not here and self.deposits.take(run.waiting, run.uses, step, run.count + count):
                            break
                        run.merge(step, self.deposits.merging)
                    run.visit(step)
                    self.settle_last(run.uses, step)
            self.run = Run(self)
