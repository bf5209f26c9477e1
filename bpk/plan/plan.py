"""The plan of a backward pass: the calls behind its losses, consumers first, and where the input of each comes from.

It is made when the pass reaches its first loss; all that lies behind the losses is alive then. A stretch of plain
autograd between two recorded calls is a call like the others (`stretch.py`), so that sweeps know calls only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.engine import pull_back
from bpk.plan.graph import Source, gradient_edge
from bpk.plan.samples.rows import Attribution
from bpk.plan.sources import Sources
from bpk.plan.step import Link, Step, as_played
from bpk.plan.stretch import STRETCH
from bpk.plan.stretch_call import StretchCall
from bpk.recording import engine
from bpk.recording.context.state import CTX, EVERY_CALL
from bpk.recording.graph.side_effects import make_quiet
from bpk.recording.record import Record


class Plan:
    """The steps behind some losses, in order.

    Args:
        losses: The losses, with the node of each.
        above: The recorded calls behind them.
        sources: Where the inputs of a call come from.
        attribution: Which sample each row belongs to.
        is_whole: Whether these are all losses of the objective.
    """

    def __init__(
        self,
        losses: Mapping[Record, Node],
        above: Iterable[Record],
        sources: Sources,
        attribution: Attribution,
        is_whole: bool,
    ) -> None:
        self.losses = losses
        self.is_whole = is_whole
        above = list(above)
        nodes: dict[Record, Node | None] = dict(losses)
        for record in (*losses, *above):
            for source in sources[record].values():
                for producer, (node, _) in source.targets:
                    if node is not None:
                        nodes[producer] = node
        self.step_of: dict[Record, Step] = {}
        self.largest = 1
        for record in (*losses, *above):
            rule, call = as_played(record)
            params = record.trained()
            rows, n = attribution.of(record)
            node = nodes[record]
            step = self.step_of[record] = Step(record, rule, call, node, params, rows, n)
            step.is_loss, step.mixed = record.is_loss, attribution.mixed
            step.runs = node is None or record in losses or engine.will_run(node)
            step.find_gradients = self.find_gradients
            self.largest = max(self.largest, call.output.numel())
        for record, step in list(self.step_of.items()):
            for index, source in sources[record].items():
                if source.targets or source.trained:
                    step.links[index] = self.link(step, index, source)
            if len(step.links) > 1:
                put_beside([link.producer for link in step.links.values()])
        self.steps = consumers_first([self.step_of[loss] for loss in losses])
        self.number_uses()

    def link(self, step: Step, index: int, source: Source) -> Link:
        """What feeds an input: a call, or a stretch, whose inputs are the outputs of calls."""
        if source.stretch is None:
            record, _ = source.targets[0]
            producer = self.step_of[record]
            if step.record.aligned and record.aligned:
                return Link(producer)
            entrance, exit = source.entrance, source.exits[0]
            if entrance == exit:
                return Link(producer)
            return Link(producer, step.call.inputs[index].shape[1:], entrance=entrance, exit=exit)
        inputs = [self.step_of[record].call.output for record, _ in source.targets]
        call = StretchCall(source, step.call.inputs[index], inputs, step.samples_of_rows, step.batch_size)
        params = {str(k): p for k, p in enumerate(source.trained)}
        rows, n = step.samples_of_rows, step.batch_size
        stretch = Step(step.record, STRETCH, call, None, params, rows, n, step, index, mixed=step.mixed)
        stretch.links = {k: Link(self.step_of[record]) for k, (record, _) in enumerate(source.targets)}
        call.rows_of_inputs = [self.step_of[record].samples_of_rows for record, _ in source.targets]
        return Link(stretch)

    def number_uses(self) -> None:
        """Number the steps, and find the last use of each parameter."""
        ahead: set[int] = set()
        for number, step in reversed(list(enumerate(self.steps))):
            step.number = number
            if not step.params:
                continue
            step.reused = tuple([name for name, p in step.params.items() if id(p) in ahead])
            step.last = tuple([name for name in step.params if name not in step.reused])
            ahead.update(map(id, step.params.values()))

    def is_shared(self, param: Tensor) -> bool:
        """Whether several calls use a parameter."""
        return sum(any(p is param for p in step.params.values()) for step in self.steps) > 1

    @property
    def on_processor(self) -> bool:
        """Whether the losses are on a processor, and so is what travels."""
        return self.steps[0].call.output.device.type == "cpu"

    @property
    def key(self) -> tuple[int, ...]:
        """Tells plans of one backward pass from each other."""
        return tuple(map(id, self.losses))

    def clear(self) -> None:
        """Let go of the graph: steps refer to each other."""
        for step in self.steps:
            step.links, step.beside, step.consumer, step.find_gradients = {}, (), None, None
        self.steps, self.step_of = [], {}

    def find_gradients(self) -> None:
        """Let autograd compute the gradient at the output of every call, ahead of its own pass."""
        steps = [s for s in self.steps if s.gradient is None and s.source is None]
        edges = [edge for step in steps for edge in step.edges]
        if not edges:
            return
        ends = [gradient_edge((node, next(iter(loss.places)))) for loss, node in self.losses.items()]
        factors = [loss.sent(self.step_of[loss].grad) for loss in self.losses]
        found = iter(self.pull(ends, factors, edges, create_graph=torch.is_grad_enabled()))
        for step in steps:
            grad, out = step.gradient_of(found), step.call.output
            step.gradient = torch.zeros_like(out) if grad is None else grad.to(out.dtype)

    def pull(
        self,
        ends: Sequence[GradientEdge],
        vectors: Sequence[Tensor],
        edges: Sequence[GradientEdge],
        create_graph: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Let autograd take vectors at some ends through all calls up to these edges, ahead of its own pass."""
        for loss, node in self.losses.items():
            if loss.module._backward_hooks:
                make_quiet(engine.hooks_at(node.register_hook))
        for step in self.steps:
            if step.consumer is None:
                step.quieten()
        with CTX.quietly(EVERY_CALL):
            return pull_back(ends, edges, vectors, create_graph=create_graph)


def put_beside(producers: Sequence[Step]) -> None:
    """Let stretches before a call know of others that lead there from the same results."""
    plain = [(s, {edge for _, edge in s.source.targets}) for s in producers if s.source is not None and not s.params]
    for step, results in plain if len(plain) > 1 else ():
        step.beside = [other for other, others in plain if other is not step and others == results]


def consumers_first(losses: Sequence[Step]) -> list[Step]:
    """All steps behind the losses, each after all that it feeds: of several the one called last, as in autograd."""
    feeds: dict[Step, int] = dict.fromkeys(losses, 0)
    waiting = list(losses)
    while waiting:
        for link in waiting.pop().links.values():
            if link.producer not in feeds:
                feeds[link.producer] = 0
                waiting.append(link.producer)
            feeds[link.producer] += 1
    order, number = list[Step](), count()  # of steps that were called at once, the one that was ready last comes first
    ready = [(called(loss), -next(number), loss) for loss in losses]
    heapify(ready)
    while ready:
        *_, step = heappop(ready)
        order.append(step)
        for link in step.links.values():
            feeds[link.producer] -= 1
            if not feeds[link.producer]:
                heappush(ready, (called(link.producer), -next(number), link.producer))
    return order


def called(step: Step) -> int:
    """Sorts steps by when they were called, the latest first; a stretch counts with the call that reads its end."""
    node = step.node if step.consumer is None else step.consumer.node
    return 0 if node is None else -node._sequence_nr()
