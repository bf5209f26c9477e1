"""Before a forward pass: the shapes that the model is given, and of a layer what its call will overwrite or draw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.engine import untraced
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.random_state import RandomState
from bpk.recording import engine
from bpk.recording.activations import nothing
from bpk.recording.context.state import CTX
from bpk.recording.context.surroundings import MANAGED
from bpk.recording.data import GIVEN, NOTHING_GIVEN, Given
from bpk.recording.fsdp import pass_on_sharding
from bpk.recording.graph.identity import alias
from bpk.recording.graph.losses import watch
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.ownership import owner_of
from bpk.recording.hooks_for_all import Watch
from bpk.recording.membership import is_users
from bpk.recording.record import Record
from bpk.rules import REGISTRY

ONE_NUMBER = (1,)
"""The shape of a number, such as the time in a differential equation: it has no samples, as without axes."""

BEFORE = "_bpk_before"
"""Under which name a layer keeps what is noted before its forward pass, until that is over."""


class Before:
    """What is noted before the forward pass of a layer.

    Of a layer that draws random numbers: the state of their generators (`drawn`). Of a layer that works in place: its
    input as it was (`kept`), where that comes from in autograd's graph (`edge`), what the layer is given (`given`, with
    its version) and, if that is a copy of a view, that view and the copy. Of a layer that users wrote: the versions of
    what it is given (`versions`), because it may work in place and not say so.
    """

    __slots__ = ("copy", "drawn", "edge", "given", "kept", "version", "versions", "viewed")

    def __init__(self, drawn: RandomState | None) -> None:
        self.drawn = drawn
        self.kept: Tensor | None = None
        self.given: Tensor | None = None
        self.version = 0
        self.edge: Edge = (None, 0)
        self.viewed: Tensor | None = None
        self.copy: Tensor | None = None
        self.versions: list[tuple[Tensor, int]] = []

    def misses(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether an input as it was is not known.

        A layer may have overwritten it without saying so by `inplace`; a hook that runs later may have given the layer
        another tensor, or have itself overwritten this one.
        """
        if any(x._version != version for x, version in self.versions):
            return True
        x = self.given
        return x is not None and (x is not next(iter(inputs), None) or x._version > self.version + 1)

    def is_unused(self) -> bool:
        """Whether nothing was drawn or copied, and nothing has been written into what the layer was given."""
        watched = [*self.versions, *([] if self.given is None else [(self.given, self.version)])]
        return self.drawn is None and self.viewed is None and all(x._version == version for x, version in watched)

    def written_back(self, output: Tensor) -> Tensor:
        """What the layer returns: what it made of the copy goes into the view, if it did work in place.

        Not every layer that says so does: `nn.AlphaDropout` does not look at its `inplace`.
        """
        worked = self.copy is not None and self.copy._version > 0
        return self.viewed.copy_(output) if worked and self.viewed is not None else output

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()


@untraced
def prepare(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of layers that may work in place, or that draw random numbers."""
    fields = module.__dict__
    fields.pop(BEFORE, None)  # of a call that failed
    rule, in_place = REGISTRY.find(module), fields.get("inplace") is True
    written = is_users(module)  # it may overwrite what it is given without an attribute `inplace`
    draws = rule is not None and rule.draws(module)
    if not (in_place or draws or written):
        return None
    if CTX.disabled or CTX.quiet or engine.is_transformed() or not torch.is_grad_enabled():
        return None
    drawn = generators_of(module) if draws else None
    name = "" if args else next(iter(kwargs), "")
    given = (args[0] if args else kwargs.get(name)) if in_place else None
    watched = [] if isinstance(given, Tensor) or not written else tensors_in((*args, *kwargs.values()))
    before = fields[BEFORE] = Before(drawn)
    if not isinstance(given, Tensor):
        before.versions = [(x, x._version) for x in watched if not x.is_inference()]
        return None
    x = before.given = keep_input(module, given, before)
    before.version = x._version
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})


def generators_of(module: nn.Module) -> RandomState:
    """The state from which the random numbers of a call can be drawn again."""
    parameter = next(module.parameters(), None)
    return RandomState.now(None if parameter is None else parameter.device)


def keep_input(module: nn.Module, x: Tensor, before: Before) -> Tensor:
    """Keep the input that a layer will overwrite; returns what the layer is given.

    Where that is a view, autograd rebuilds the graph around the viewed tensor, and no call could be found there. So the
    layer works on a copy, and its result is copied into the view.
    """
    rule = REGISTRY.find(module)
    copied = rule is not None and (not rule.from_output or engine.checkpointing() is not None)  # see `require_result`
    if not x.requires_grad:
        before.kept = x.detach().clone() if copied else x
        return x
    memory = x if x._base is None else x._base
    producer = None if memory.grad_fn is None else owner_of(memory.grad_fn)
    if producer is not None:
        keep_output(producer)
    if x._is_view():
        before.viewed = x
        x = before.copy = x.clone()
    kept, before.edge = keep(x)
    before.kept = alias(x.clone()) if copied else kept
    return x


def keep_output(record: Record) -> None:
    """Before the output of a call is overwritten: copy it where it stands in for an input that it overwrote itself."""
    if record.rule is None or not record.rule.from_output or record.recomputed is not None:
        return
    out = record.output
    if any(x.is_set_to(out) for x in record.inputs):
        number = next(iter(record.results))
        record.results[number] = out.clone()
        record.versions[len(record.inputs)] = record.results[number]._version
        if record.stored is not None and record.module.__dict__.get("output") is record.stored:
            record.store()


def keep(x: Tensor) -> tuple[Tensor, Edge]:
    """An alias of `x` that in-place operations cannot move, and the graph edge that leads to `x`."""
    if not x.requires_grad:
        return x.detach(), (None, 0)
    kept, node = alias(x), x.grad_fn
    return kept, kept.grad_fn.next_functions[0] if node is None else (node, x.output_nr)


@untraced
def note_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the module that was extended: what it is given says how many samples there may be."""
    if CTX.called is None and not (CTX.quiet and engine.checkpointing() is None):  # `bpk` calls it again: no model runs
        tensors = [x for x in tensors_in((*args, *kwargs.values())) if x.dim() and not x.is_nested]
        given = [x for x in tensors if x.shape != ONE_NUMBER] or tensors
        CTX.called, CTX.given = module, Given.of(given)
        if engine.GLOBAL_FORWARD_HOOKS and CTX.watch is None:
            CTX.watch = Watch()
        if MANAGED in sys.modules:
            pass_on_sharding()


@untraced
def forget_inputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of the same module, called also where its forward pass has failed.

    The nodes of its results keep the shapes, for calls that are written down from the graph.
    """
    if CTX.called is module:
        for x in tensors_in(output):
            node = x.grad_fn
            if node is not None and CTX.given.data is not None:
                CTX.given.data.keep()
                engine.belongings(node)[GIVEN] = CTX.given
            if node is not None and not x.dim():
                watch(node)
        CTX.called, CTX.given = None, NOTHING_GIVEN
        if CTX.watch is not None:
            CTX.watch.end()
            CTX.watch = None
