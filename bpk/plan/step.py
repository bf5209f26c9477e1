"""One call of a plan, and what feeds its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.no_rows import with_rows
from bpk.jacobians.families.passage import PASSAGE
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.plan.graph import Source, connected, gradient_edge, quieten_layer
from bpk.plan.stretch import STRETCH
from bpk.plan.stretch_call import StretchCall
from bpk.recording.graph.ports import OneSample, Port
from bpk.recording.record import Record


@dataclass(eq=False, kw_only=True)
class Alignment:
    """How an input of a call corresponds to the result that feeds it: as it is, or with its axes in another order."""

    entrance: Port | OneSample | None = None
    exit: Port | None = None

    def back(self, mat: Tensor) -> Tensor:
        """Columns at the input as columns at the producer's result."""
        if self.entrance is None or self.exit is None:
            return mat
        return self.exit.to_rule(self.entrance.to_graph(mat))

    def forth(self, mat: Tensor) -> Tensor:
        """Columns at the producer's result as columns at the input."""
        if self.entrance is None or self.exit is None:
            return mat
        return self.entrance.to_rule(self.exit.to_graph(mat))


@dataclass(eq=False)
class Link(Alignment):
    """What feeds an input of a call: the result of another call. If aligned, `shape` is the input's, for one sample."""

    producer: Step
    shape: tuple[int, ...] = ()

    def rows_back(self, mat: Tensor) -> Tensor:
        """Rows `[V, D]` over the entries of the input as rows over those of the producer's result."""
        return mat if self.entrance is None else self.back(mat.reshape(-1, 1, *self.shape)).reshape(len(mat), -1)


class Progress:
    """What becomes of a step: its place in the plan, what sweeps have done there; at first, that of every step.

    `reused` names parameters that calls further up use as well, `last` the others. A step `runs` if autograd evaluates
    it in this pass.
    """

    number: int = 0
    reused: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    reached: bool = False
    prepared: bool = False
    quiet: bool = False
    runs: bool = True
    is_loss: bool = False
    find_gradients: Callable[[], None] | None = None


@dataclass(eq=False)
class Step(Progress):
    """One call of a plan.

    `record` is the recorded call, and for a stretch the one that reads its end, at input `index`. `links` say what
    feeds its inputs, `params` are those that get fields. Stretches without parameters that lead from the same calls to
    the same one stand `beside` each other. Where rows are not the samples in order, `samples_of_rows`
    says which of the `batch_size` samples each belongs to; all to the only one where samples are `mixed`.
    """

    record: Record
    rule: Rule | None
    call: Call
    node: Node | None
    params: dict[str, Tensor]
    samples_of_rows: Tensor | None
    batch_size: int
    consumer: Step | None = None
    index: int = 0
    gradient: Tensor | None = None
    mixed: bool = False
    links: dict[int, Link] = field(default_factory=dict, init=False)
    views: dict[tuple[int, ...], Call] = field(default_factory=dict, init=False)
    beside: Sequence[Step] = field(default=(), init=False)

    @property
    def source(self) -> Source | None:
        """The stretch, if this is one."""
        return self.call.source if isinstance(self.call, StretchCall) else None

    @property
    def edges(self) -> list[GradientEdge]:
        """Where the results of a recorded call are in autograd's graph."""
        return [gradient_edge((self.node, nr)) for nr in self.record.places]

    def gradient_of(self, found: Iterator[Tensor | None]) -> Tensor | None:
        """What has come to its `edges`, as the rule sees it."""
        grads: list[Tensor | None] = [None] * (1 + max(self.record.places))
        for nr in self.record.places:
            grads[nr] = next(found)
        return self.record.gradient(tuple(grads))

    @property
    def is_layer(self) -> bool:
        """Whether it is the call of a layer: no functions in front of one, and no parameters that a container holds."""
        return self.consumer is None and self.rule is not PASSAGE and not isinstance(self.record.module, Plain)

    @property
    def where(self) -> str:
        """How messages call it."""
        return self.record.where if self.consumer is None else f"the function before {self.record.where}"

    @cached_property
    def factor(self) -> float:
        """The number in front of a loss; it is read once, for which a processor waits until a GPU has come there."""
        return float(self.grad)

    @cached_property
    def joint(self) -> Joint:
        """A loss as a function of the inputs that calls or parameters feed."""
        assert isinstance(self.rule, Loss)
        return self.rule.joint(self.call, tuple(self.links))

    @property
    def grad(self) -> Tensor:
        """The gradient at the call's output, found when it is asked for; at a loss, its factor in the objective."""
        if self.gradient is None and self.find_gradients is not None:
            self.find_gradients()
        if self.gradient is None:
            reader = self.consumer
            assert reader is not None and reader.rule is not None
            self.gradient = reader.rule.jac_t_mat_prod(reader.call, reader.grad[None], self.index)[0]
        return self.gradient

    def quieten(self) -> None:
        """Let hooks inside of the layer not see what is differentiated, from now on in this pass."""
        if not self.quiet and self.node is not None:
            quieten_layer(self.record, self.node)
            self.quiet = True

    def prepare(self) -> None:
        """Let the rule note what is only known during the backward pass."""
        if self.rule is not None and type(self.rule).capture is not Rule.capture and self.node is not None:
            self.quieten()
            with connected(self.record, self.call, self.node, quiet=self.quiet):
                self.rule.capture(self.call)
        self.prepared = True

    def view(self, samples: tuple[int, ...] | None) -> Call:
        """The call restricted to some samples; a loss stays whole, and so does all where samples mix."""
        if not self.prepared:
            self.prepare()
        if samples is None or self.is_loss or self.mixed:
            return self.call
        if samples not in self.views:
            self.views[samples] = self.call.subset(samples)
        return self.views[samples]

    def seen(self, samples: tuple[int, ...] | None) -> tuple[Rule, Call]:
        """The call restricted to some samples, with its rule: one that takes an empty batch, if these are none."""
        assert self.rule is not None
        view = self.view(samples)
        return self.rule if samples != () or self.rule is STRETCH else with_rows(self.rule, view), view

    def cast(self, mat: Tensor) -> Tensor:
        """Bring what has arrived to the precision of the call."""
        return promoted(mat, self.call)

    def renew(self) -> None:
        """The call has other inputs than when the plan was made."""
        self.rule, self.call = as_played(self.record)
        self.views = {}
        self.__dict__.pop("joint", None)

    def let_go(self) -> None:
        """Drop what rules have computed for this call."""
        self.views = {}
        if self.consumer is None:
            self.record.cached = None


def as_played(record: Record) -> tuple[Rule | None, Call]:
    """Rule and call as sweeps see them: in one precision, and with a rule that takes an empty batch if it is one."""
    call = record.call()
    call = matched(call.output, call)[1]
    return None if record.rule is None else with_rows(record.rule, call), call


def promoted(mat: Tensor, call: Call) -> Tensor:
    """Bring columns to the precision of a call's output, if that is higher (autocast)."""
    if mat.dtype is call.output.dtype:
        return mat
    return mat.to(torch.promote_types(mat.dtype, call.output.dtype))


def matched(grad: Tensor, call: Call) -> tuple[Tensor, Call]:
    """Bring a call and its gradient to one dtype (autocast mixes them)."""
    dtype, differ = grad.dtype, False
    for x in (*call.inputs, *call.params.values()):
        if x.dtype is not dtype and x.dtype.is_floating_point:
            dtype, differ = torch.promote_types(dtype, x.dtype), True
    return (grad.to(dtype), call.cast(dtype)) if differ else (grad, call)
