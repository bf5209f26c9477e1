"""A pass of some samples of a batch: what it takes, and what it has sent back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.backward import Backward
from bpk.context import backpack, disable
from bpk.costing.allocated import allocated
from bpk.extending import attach, check_module, follow
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.errors import explain, value_error
from bpk.jacobians.losses.loss import Loss
from bpk.recording.context.opened import Pass
from bpk.recording.context.state import CTX
from bpk.recording.membership import parts_of
from bpk.recording.record import Record
from bpk.sweeps.columns.column_sweep import ColumnSweep
from bpk.sweeps.columns.limits import columns_at_a_time
from bpk.verification.picked import Picked
from bpk.verification.problem import Arguments, Problem, with_tensors

SECONDS, TIMES = 0.3, 3
"""Passes are timed again until so much time is over, and that often at least where it is not over ten times."""


class Observed(backpack):
    """A context that notes of its last pass how many `samples` it had, and how many `columns` went back in `rounds`.

    `at_most` is how many columns a batch that is `growth` times as large would send at a time.
    """

    def __init__(self, *extensions: BackpropExtension, memory: int | None, chunk_size: int | None) -> None:
        super().__init__(*extensions, memory=memory, chunk_size=chunk_size)
        self.samples, self.columns, self.rounds = 0, 0, 0
        self.growth, self.at_most = 1.0, chunk_size

    def begin(self, task: int, under_way: dict[int, Pass]) -> Backward:
        self.samples = self.columns = self.rounds = 0
        return ObservedBackward(self, task, under_way)


class ObservedBackward(Backward):
    """The pass."""

    context: Observed

    def inspect(self, root: Record, node: Node) -> None:
        super().inspect(root, node)
        if self.inspection.merged is not None:
            return  # samples mix, and are looked at as one
        losses = [loss for loss in self.inspection.above if isinstance(loss.rule, Loss)]
        self.context.samples = max([0, *map(self.inspection.attribution.batch_size, losses)])

    def clear(self) -> None:
        context, plan = self.context, self.at_losses.plan
        for sweep in self.sweeps.players.values():
            if isinstance(sweep, ColumnSweep):
                context.columns, context.rounds = context.columns + sweep.started, max(context.rounds, sweep.rounds)
        if plan is not None and plan.steps:
            context.at_most = columns_at_a_time(plan, context.chunk_size, context.memory, context.growth)
        super().clear()


@dataclass(frozen=True)
class Taken:
    """What one pass takes: seconds, bytes at its peak and afterwards, columns, and how often the layers are passed."""

    seconds: float
    peak: int
    kept: int
    columns: int
    rounds: int


class SubBatches:
    """Passes of the first samples of a batch through copies of model and loss.

    Args:
        problem: The copies, and the whole batch.
        model: Whose parts are extended (all, if none is).
        device: Where it computes.
        clock: What tells seconds.
    """

    def __init__(
        self, problem: Problem, model: nn.Module, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.problem, self.device, self.clock = problem, device, clock
        check_module(model)
        for path in parts_of(model):
            part = problem.model.get_submodule(path)
            attach(part, path, False)
            follow(part)
        if not isinstance(problem.loss, Picked):
            check_module(problem.loss)
            attach(problem.loss, "", False)
            follow(problem.loss)

    def first(self, count: int) -> Problem:
        """The problem with its first samples."""
        problem, n, axis = self.problem, self.problem.inputs.n, self.problem.inputs.axis

        def of_input(x: Tensor) -> Tensor:
            return x.narrow(axis, 0, count).clone() if x.dim() > axis and x.shape[axis] == n else x

        def of_target(x: Tensor) -> Tensor:
            if x.dim() > axis and x.shape[axis] == n:
                return x.narrow(axis, 0, count)
            per_sample = len(x) // n if x.dim() and not len(x) % n and (not axis or len(x) == n) else 0
            return x[: count * per_sample] if per_sample else x

        inputs = problem.inputs.map(of_input)
        inputs = Arguments(inputs.args, inputs.kwargs, axis, count)
        return Problem(problem.model, problem.loss, inputs, with_tensors(problem.targets, of_target), problem.seed)

    def measure(
        self, extensions: tuple[BackpropExtension, ...], counts: Sequence[int], **limits: int | None
    ) -> list[Taken]:
        """What passes of the first samples take, with these limits of columns; no extensions: the gradient alone."""
        works, found = [], []
        for count in counts:
            context = Observed(*extensions, **limits) if extensions else None
            works.append(self.passing(self.first(count), context))
            self.forget()
            gc.collect()  # what is let go of meanwhile would count
            try:
                peak, kept = allocated(works[-1], self.device)
            except Exception as error:
                if context is None:
                    self.require_pass()
                    raise ValueError(not_cut(count, f"the model fails with them: {error}")) from error
                raise
            if context is None:
                found.append(Taken(0.0, peak, kept, 0, 0))
            elif context.samples in (0, count):
                found.append(Taken(0.0, peak, kept, context.columns, context.rounds))
            else:
                raise ValueError(not_cut(count, f"the loss has {context.samples}"))
        seconds = self.timed(works)
        self.forget()
        return [replace(one, seconds=typical) for one, typical in zip(found, seconds, strict=True)]

    def require_pass(self) -> None:
        """Refuse a batch that cannot pass as it is."""
        try:
            self.passing(self.problem, None)()
        except Exception as error:  # whatever the user's model or loss raises
            raise value_error(
                f"bpk.cost(...): a forward and backward pass of the batch fails: {str(error).rstrip('.')}.",
                "time and memory are those of loss(model(inputs), targets).backward(), on copies.",
                "pass what this runs with: a loss that is a scalar, its targets, and parameters that are trained.",
            ) from error

    def timed(self, works: Sequence[Callable[[], None]]) -> list[float]:
        """The median time of each, in turns, so that what else the machine does falls on all of them.

        Each has fields of its own, into whose memory the next ones are written, as in training.
        """
        params = list(self.problem.model.parameters())
        fields: list[list[dict[str, Any]]] = [[{} for _ in params] for _ in works]
        seconds: list[list[float]] = []
        start, spent = self.now(), 0.0
        while not seconds or spent < SECONDS or (len(seconds) < TIMES and spent < 10 * SECONDS):
            seconds.append([])
            for work, mine in zip(works, fields, strict=True):
                for param, saved in zip(params, mine, strict=True):
                    vars(param).update(saved)
                    saved.clear()
                began = self.now()
                work()
                seconds[-1].append(self.now() - began)
                for param, saved in zip(params, mine, strict=True):
                    saved.update(vars(param))
                    vars(param).clear()
            spent = self.now() - start
        return [median(times) for times in zip(*seconds, strict=True)]

    def columns_for(self, extensions: tuple[BackpropExtension, ...], count: int, **limits: int | None) -> int | None:
        """How many columns the whole batch sends at a time, by a pass of the first samples."""
        context = Observed(*extensions, **limits)
        context.growth = self.problem.inputs.n / count
        self.passing(self.first(count), context)()
        return context.at_most

    def passing(self, problem: Problem, context: Observed | None) -> Callable[[], None]:
        """A forward and a backward pass, without a context of the gradient alone."""

        def work() -> None:
            for param in self.problem.model.parameters():
                param.grad = None
            with context or alone():
                problem.objective(problem.predict()).backward()

        return work

    def now(self) -> float:
        """Seconds, when the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def forget(self) -> None:
        """Parameters as they were built."""
        for param in self.problem.model.parameters():
            param.grad = None
            vars(param).clear()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, passes are without quantities, and none of an enclosing `backpack(...)`."""
    with disable(), CTX.unseen():
        yield


def not_cut(meant: int, problem: str) -> str:
    """The refusal of a batch from which samples cannot be taken."""
    return explain(
        f"bpk.cost(...) took {meant} samples of the batch, and {problem.rstrip('.')}.",
        "time and memory of a batch are foretold from those of its first samples; they are the first entries of every "
        "input along batch_axis, and of every target along its first axis.",
        "pass batch_axis=, or inputs and targets of which each sample is an entry.",
    )
