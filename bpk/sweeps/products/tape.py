"""The tape of the calls between a parameter and the loss, from which products with curvature blocks are made.

Every call is written down when autograd is there, latest first; `block.py` plays the tape both ways.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import runtime_error
from bpk.jacobians.families.passage import PASSAGE
from bpk.plan.step import Alignment, Step
from bpk.recording.changed import Stamp, is_changed, stamp
from bpk.recording.hyperparameters import Hyperparameters
from bpk.recording.membership import wholes_of
from bpk.sweeps.products.call_products import CallProducts, linearised
from bpk.sweeps.sweep import Sweep


@dataclass(eq=False)
class Feed(Alignment):
    """What feeds an input: another call by its number, not its graph."""

    producer: int


@dataclass(kw_only=True)
class Frame(CallProducts):
    """What the tape keeps of one call.

    `params` are, by name, the `id`s of the parameters that it uses. `hyperparameters` are those of the call, in the
    module or among the arguments in `options`.
    """

    number: int
    feeds: dict[int, Feed]
    where: str
    samples: tuple[int, ...] | None
    params: dict[str, int]
    terms: Tensor | None = None
    hyperparameters: Hyperparameters | None = None
    options: Any = None
    stamps: list[tuple[Tensor, Stamp]] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    live: list[tuple[weakref.ref[Tensor], Stamp]] = field(default_factory=list)

    def stamp(self, leaves: Iterable[Tensor], live: Iterable[Tensor], has_views: bool) -> None:
        """Note which tensors must not change; of those that are `live`, the call has its own views.

        If it `has_views` of all, which nobody else knows, these stay where they are, and a version is enough.
        """
        mine = (*self.call.inputs, *self.call.params.values())
        self.stamps = [(x, stamp(x)) for x in (*leaves, *(() if has_views else mine))]
        self.versions = [(x, x._version) for x in mine if not x.is_inference()] if has_views else []
        self.live = [(weakref.ref(x), stamp(x)) for x in live]

    def verify(self) -> None:
        """Refuse if a tensor of the forward pass, or a parameter, was changed since; see hyperparameters as they were.

        What was computed from parameters that have other memory by now, or from other hyperparameters, is dropped:
        it may read them. Buffers that were changed are refused where a rule reads them.
        """
        if self.hyperparameters is not None:
            options, moved = self.hyperparameters.as_called(self.options), False
            for ref, known in self.live:
                x = ref()
                moved = moved or (x is not None and is_changed(x, known))
            if moved or options is not self.options:
                self.call = self.call.seen_with(options)
        changed = [x for x, version in self.versions if x._version != version]
        if changed or [x for x, known in self.stamps if is_changed(x, known)]:
            raise runtime_error(
                f"Tensors of {self.where} were changed since the backward pass.",
                "the product belongs to the point at which the gradient was taken; mixing two points is wrong.",
                "call the product before optimizer.step(), or run forward and backward again.",
            )


class Tape(Sweep):
    """Write down every visited call, latest first, for products later on.

    `factored` says whether residuals will be made positive semi-definite.
    """

    differentiates_twice = True

    def __init__(self, samples: tuple[int, ...] | None = None, factored: bool = False) -> None:
        super().__init__(samples, factored)
        self.factored = factored
        self.needs_root = factored  # clipping leaves the loss Hessian alone
        self.frames: list[Frame] = []
        self.models: list[weakref.ref[nn.Module]] = []
        self.products: weakref.WeakSet[Any] = weakref.WeakSet()

    def visit(self, step: Step) -> tuple[Tape, int]:
        """Add a frame; what arrives at the call is the tape, up to it."""
        if step.params:
            self.live_within(step.record.module)
        rule, view = step.seen(self.samples)
        kept = view if torch.is_grad_enabled() else view.detached()  # a live graph would lead back to the parameter
        samples = None if step.mixed else self.samples
        grad = step.grad if step.is_loss or step.mixed else self.rows(step.grad)
        links = step.links.items()
        feeds = {index: Feed(link.producer.number, entrance=link.entrance, exit=link.exit) for index, link in links}
        params = {name: id(p) for name, p in step.params.items()}
        stretch = linearised(step, self.samples, self.factored)
        if stretch is not None:
            kept = Call(None, (), {}, step.call.output.new_empty(0))
        elif step.rule is PASSAGE:
            kept = Call(None, kept.inputs, kept.params, kept.output, used=kept.used)  # the module is often the model
        frame = Frame(
            rule=rule,
            call=kept,
            grad=grad,
            stretch=stretch,
            number=step.number,
            feeds=feeds,
            where=step.where,
            samples=samples,
            params=params,
        )
        frame.terms = self.terms(step) if step.is_loss else None
        if stretch is None and step.rule is not PASSAGE:
            frame.hyperparameters, frame.options = step.record.hyperparameters, step.record.binding.options
        leaves = () if step.source is None else step.source.leaves
        frame.stamp(leaves, view.params.values(), has_views=not torch.is_grad_enabled())
        self.frames.append(frame)
        return self, len(self.frames)

    def live_within(self, module: nn.Module) -> None:
        """Let parameters have the products as long as an extended model exists that the layer is in.

        The graph of a stretch leads to parameters, which have the products in their fields. Python's garbage collector
        does not see the graph, so that nothing else would end this circle.
        """
        for model in wholes_of([module]) or ():
            tapes = TAPES.get(model)
            if tapes is None:
                tapes = TAPES[model] = weakref.WeakSet()
                weakref.finalize(model, end, tapes).atexit = False
            if self not in tapes:
                tapes.add(self)
                self.models.append(weakref.ref(model))


TAPES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Tape]] = weakref.WeakKeyDictionary()
"""The tapes of each model whose parameters have products."""


def end(tapes: Iterable[Tape]) -> None:
    """A model is gone: parameters lose the products of tapes of which it was the last model."""
    for tape in list(tapes):
        for product in list(tape.products) if all(ref() is None for ref in tape.models) else ():
            fields = vars(product.param)
            for name in [name for name, value in fields.items() if value is product]:
                del fields[name]
