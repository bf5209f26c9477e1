"""The plan of a backward pass: the calls behind its losses, consumers first, and where the input of each comes from.

It is made when the pass reaches its first loss; all that lies behind the losses is alive then. A stretch of plain
autograd between two recorded calls is a call like the others (`stretch.py`), so that sweeps know calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.call import Call
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.plan.graph import Source, connected, gradient_edge
from bpk.plan.samples import Attribution
from bpk.plan.stretch import STRETCH, StretchCall
from bpk.recording import engine
from bpk.recording.bystanders import make_quiet
from bpk.recording.ports import Port
from bpk.recording.record import Record
from bpk.recording.state import CTX, EVERY_CALL

SourcesOf = Callable[[Record], dict[int, Source]]


@dataclass(frozen=True)
class Link:
    """What feeds an input of a call: the result of another call, maybe with its axes in another order.

    Then `shape` is that of the input, for one sample.
    """

    producer: Step
    entrance: Port | None = None
    exit: Port | None = None
    shape: tuple[int, ...] = ()

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

    def rows_back(self, mat: Tensor) -> Tensor:
        """Rows `[V, D]` over the entries of the input as rows over those of the producer's result."""
        return mat if self.entrance is None else self.back(mat.reshape(-1, 1, *self.shape)).reshape(len(mat), -1)


@dataclass(eq=False)
class Step:
    """One call of a plan.

    `record` is the recorded call, and for a stretch the one that reads its end, at input `index`. `links` say what
    feeds its inputs, `params` are those that get fields; `reused` names those that calls further up use as well, and
    `last` the others. Where rows are not the samples in order, `samples_of_rows` says which of the `batch_size` samples
    each belongs to.
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
    number: int = 0
    links: dict[int, Link] = field(default_factory=dict)
    reused: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    reached: bool = False
    gradient: Tensor | None = None
    views: dict[tuple[int, ...], Call] = field(default_factory=dict)
    prepared: bool = False

    @property
    def source(self) -> Source | None:
        """The stretch, if this is one."""
        return self.call.source if isinstance(self.call, StretchCall) else None

    @property
    def where(self) -> str:
        """How messages call it."""
        name = f"'{self.record.path}' ({type(self.record.module).__name__})"
        return name if self.consumer is None else f"the function before {name}"

    @cached_property
    def joint(self) -> Joint:
        """A loss as a function of the inputs that calls or parameters feed."""
        assert isinstance(self.rule, Loss)
        return self.rule.joint(self.call, tuple(self.links))

    @property
    def grad(self) -> Tensor:
        """The gradient at the call's output (see `Plan.find_gradients`); at a loss, its factor in the objective."""
        if self.gradient is None:
            reader = self.consumer
            assert reader is not None and reader.rule is not None
            self.gradient = reader.rule.jac_t_mat_prod(reader.call, reader.grad[None], self.index)[0]
        return self.gradient

    def prepare(self) -> None:
        """Let the rule note what is only known during the backward pass."""
        captures = self.rule is not None and type(self.rule).capture is not Rule.capture
        if captures and not self.prepared and self.node is not None:
            assert self.rule is not None
            with connected(self.record, self.call, self.node):
                self.rule.capture(self.call)
        self.prepared = True

    def view(self, samples: tuple[int, ...] | None) -> Call:
        """The call restricted to some samples; a loss stays whole."""
        self.prepare()
        if samples is None or isinstance(self.rule, Loss):
            return self.call
        if samples not in self.views:
            self.views[samples] = self.call.subset(samples)
        return self.views[samples]

    def cast(self, mat: Tensor) -> Tensor:
        """Bring what has arrived to the precision of the call, if that is higher (autocast)."""
        return mat.to(torch.promote_types(mat.dtype, self.call.output.dtype))

    def let_go(self) -> None:
        """Drop what rules have computed for this call."""
        self.views = {}
        if self.source is None:
            self.record.seen = None


class Plan:
    """The steps behind some losses, in order.

    Args:
        losses: The losses, with the node of each.
        above: The recorded calls behind them.
        sources_of: What feeds the inputs of a call.
        attribution: Which sample each row belongs to.
    """

    def __init__(
        self,
        losses: Mapping[Record, Node],
        above: Iterable[Record],
        sources_of: SourcesOf,
        attribution: Attribution,
    ) -> None:
        self.losses = losses
        above = list(above)
        found = {id(r): sources_of(r) for r in (*losses, *above)}
        nodes: dict[Record, Node | None] = dict(losses)
        nodes |= {
            r: edge[0] for s in found.values() for k in s.values() for r, edge in k.targets if edge[0] is not None
        }
        self.of: dict[Record, Step] = {}
        for record in (*losses, *above):
            _, call = matched(record.output, record.call())
            params = {name: p for name, p in record.params.items() if p.requires_grad and p.is_leaf}
            rows, n = attribution.rows(record), attribution.batch_size(record)
            self.of[record] = Step(record, record.rule, call, nodes[record], params, rows, n)
        for record, step in list(self.of.items()):
            for index, source in found[id(record)].items():
                if source.targets or source.trained:
                    step.links[index] = self.link(step, index, source)
        self.steps = in_order([self.of[loss] for loss in losses])
        self.largest = max([1, *(record.largest for record in above)])
        self.number_uses()

    def link(self, step: Step, index: int, source: Source) -> Link:
        """What feeds an input: a call, or a stretch, whose inputs are the outputs of calls."""
        if source.stretch is None:
            entrance, exit = source.entrance, source.exits[0]
            producer = self.of[source.targets[0][0]]
            return (
                Link(producer)
                if entrance == exit
                else Link(producer, entrance, exit, step.call.inputs[index].shape[1:])
            )
        inputs = [self.of[record].call.output for record, _ in source.targets]
        call = StretchCall(source, step.call.inputs[index], inputs, step.samples_of_rows, step.batch_size)
        params = dict(call.params)
        stretch = Step(step.record, STRETCH, call, None, params, step.samples_of_rows, step.batch_size, step, index)
        stretch.links = {k: Link(self.of[record]) for k, (record, _) in enumerate(source.targets)}
        call.rows_of_inputs = [self.of[record].samples_of_rows for record, _ in source.targets]
        return Link(stretch)

    def number_uses(self) -> None:
        """Number the steps, and find the last use of each parameter."""
        ahead: set[int] = set()
        for number, step in reversed(list(enumerate(self.steps))):
            step.number = number
            step.reused = tuple([name for name, p in step.params.items() if id(p) in ahead])
            step.last = tuple([name for name in step.params if name not in step.reused])
            ahead.update(map(id, step.params.values()))

    def is_shared(self, param: Tensor) -> bool:
        """Whether several calls use a parameter."""
        return sum(any(p is param for p in step.params.values()) for step in self.steps) > 1

    @property
    def name(self) -> tuple[int, ...]:
        """Tells plans of one backward pass from each other."""
        return tuple(map(id, self.losses))

    def clear(self) -> None:
        """Let go of the graph: steps refer to each other."""
        for step in self.steps:
            step.links, step.consumer = {}, None
        self.steps, self.of = [], {}

    def find_gradients(self) -> None:
        """Let autograd compute the gradient at the output of every call, ahead of its own pass."""
        steps = [s for s in self.steps if s.gradient is None and s.source is None]
        edges = [gradient_edge((s.node, nr)) for s in steps for nr in s.record.places]
        if not edges:
            return
        ends = [gradient_edge((node, next(iter(loss.places)))) for loss, node in self.losses.items()]
        for loss, node in self.losses.items():
            if loss.module._backward_hooks:
                make_quiet(engine.hooks_behind(node))
        with CTX.quietly(EVERY_CALL):
            found = iter(
                torch.autograd.grad(
                    ends,
                    edges,
                    [self.of[loss].grad for loss in self.losses],
                    retain_graph=True,
                    allow_unused=True,
                    create_graph=torch.is_grad_enabled(),
                )
            )
        for step in steps:
            width = max(step.record.places) + 1
            grads: list[Tensor | None] = [None] * width
            for nr in step.record.places:
                grads[nr] = next(found)
            grad = step.record.gradient(tuple(grads))
            step.gradient = torch.zeros_like(step.call.output) if grad is None else grad.to(step.call.output.dtype)


def in_order(losses: Sequence[Step]) -> list[Step]:
    """All steps behind the losses, each after all that it feeds."""
    feeds: dict[Step, int] = dict.fromkeys(losses, 0)
    waiting = list(losses)
    while waiting:
        for link in waiting.pop().links.values():
            if link.producer not in feeds:
                feeds[link.producer] = 0
                waiting.append(link.producer)
            feeds[link.producer] += 1
    order, ready = list[Step](), list(reversed(losses))
    while ready:
        step = ready.pop()
        order.append(step)
        for link in step.links.values():
            feeds[link.producer] -= 1
            if not feeds[link.producer]:
                ready.append(link.producer)
    return order


def matched(grad: Tensor, call: Call) -> tuple[Tensor, Call]:
    """Bring a call and its gradient to one dtype (autocast mixes them)."""
    tensors = [grad, *call.inputs, *call.params.values()]
    kinds = {t.dtype for t in tensors if t.is_floating_point()}
    if len(kinds) <= 1:
        return grad, call
    dtype = grad.dtype
    for kind in kinds:
        dtype = torch.promote_types(dtype, kind)
    return grad.to(dtype), call.cast(dtype)
