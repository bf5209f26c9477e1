"""A record: what is known of one call of an extended layer, from its forward pass to its backward pass.

A record lives exactly as long as the autograd graph does, because the graph node of the layer's output owns it.
It holds no reference back to that node (the output is kept detached), so dropping the loss or the model frees
everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import runtime_error
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.activations import forget, store_on
from bpk.recording.changed import Changed, Stamp, changed, stamp
from bpk.recording.context.state import CTX
from bpk.recording.data import Given
from bpk.recording.graph.connections import VERSION, Connected
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.ports import MatrixLayout
from bpk.recording.hyperparameters import hyperparameters_of
from bpk.recording.membership import path_of, where_is

LIVE: set[weakref.ref[Record]] = set()
"""The records that exist. They say themselves whether they still await a backward pass."""

NOTHING = torch.empty(0)
"""Stands in for tensors that were let go."""


class Record(Connected):
    """One recorded call of a layer: module, rule, inputs, results, and how these are connected to the graph.

    `given` are the shapes of the tensors with which the whole model was called; `reads_data` says that the call reads
    the first one, or a part of it, `reads_piece` that it reads a part, such as a step of time. `data_axis` is the axis
    of its first input along which that of data runs which is in front there (`None`: not known, or shapes tell).
    `contexts` are those that the thread of the forward pass is in.
    `owners` are the sequences `[R]` of its rows, where a packed sequence tells (`packed.py`).
    `handed` refers to the tensors that the layer was given and has returned, for as long as they live. `drawn` is the
    state of the generators before the call. `stored` is the output as it was stored on the module. `open`: a backward
    pass is awaited. `released`: the tensors are gone. `left` are the layers behind a loss whose calls a pass has left
    to autograd: another pass over the same graph finds no records of these. `terms` are what a loss has returned whose
    call counts as their sum (`terms.py`).
    """

    __slots__ = (
        *("__weakref__", "cached", "contexts", "data_axis", "drawn", "frozen", "given", "handed", "hyperparameters"),
        *("is_loss", "left", "module", "open", "owners", "params", "reads_data", "reads_piece", "released", "rule"),
        *("stamps", "stored", "terms"),
    )

    def __init__(
        self,
        module: nn.Module,
        rule: Rule | None,
        binding: Binding,
        inputs: tuple[Tensor, ...],
        edges: tuple[Edge, ...],
        results: dict[int, Tensor],
        places: dict[int, int],
        hooks: engine.SavedTensorHooks | None = None,
        params: dict[str, Tensor] | None = None,
        layout: MatrixLayout | None = None,
    ) -> None:
        super().__init__(binding, inputs, edges, results, places, hooks, layout)
        self.module = module
        self.rule = rule
        self.is_loss = rule is not None and rule.is_loss
        self.params = params or {}
        self.stamps: list[Stamp] = []
        self.frozen: list[str] = []
        for name, p in self.params.items():
            self.stamps.append(stamp(p))
            if not p.requires_grad:
                self.frozen.append(name)
        self.handed: Sequence[weakref.ref[Tensor]] = ()
        self.drawn: RandomState | None = None
        self.cached: tuple[tuple[object, ...], list[Tensor], Call] | None = None
        self.stored: Tensor | None = None
        self.terms: Tensor | None = None
        self.owners: Tensor | None = None
        self.left: Sequence[nn.Module] = ()
        self.open, self.released = True, False
        self.hyperparameters = hyperparameters_of(module, binding.options)
        self.reads_data, self.reads_piece = False, False
        self.data_axis: int | None = None
        self.look_at(CTX.given, inputs)
        self.contexts = CTX.entered
        if self.contexts:
            self.contexts[-1].recorded = True
        if self.params:
            LIVE.add(weakref.ref(self, LIVE.discard))

    def look_at(self, given: Given, inputs: tuple[Tensor, ...]) -> None:
        """Note what the whole model was given, and how the first input lies in it, if that has no graph."""
        self.given, data = given, given.data
        if data is not None and inputs and self.edges[0][0] is None and data.is_there:
            data.is_seen |= self.rule is not None and bool(self.params)
            self.reads_data = data.is_read(inputs, self.edges)
            self.reads_piece = self.reads_data and inputs[0].numel() < data.size
            x = inputs[0].detach()
            self.data_axis = data.axis_in_view(x) if self.reads_data else data.axis_in_copy(x, given)

    def store(self) -> None:
        """Store what user-written module extensions read on the layer."""
        self.stored = store_on(self.module, self.inputs, self.output)

    @property
    def output(self) -> Tensor:
        """The first result."""
        return next(iter(self.results.values())) if self.results else NOTHING

    def trained(self) -> dict[str, Tensor]:
        """The parameters of the call that get fields, by name: not those that were frozen when it was made."""
        found: dict[str, Tensor] = {}
        for name, p in self.params.items():
            if p.requires_grad and p.is_leaf and name not in self.frozen:
                found[name] = p
        return found

    @property
    def is_function(self) -> bool:
        """Whether it stands for a function without parameters, which was found in autograd's graph."""
        return isinstance(self.module, Plain) and not self.params

    @property
    def path(self) -> str:
        """Where the layer sits in the extended model, for messages."""
        return path_of(self.module)

    @property
    def where(self) -> str:
        """The layer by its path and its class, for messages."""
        return where_is(self.module)

    def call(self) -> Call:
        """What the rule gets to see; refuses if a saved tensor was overwritten since."""
        gone, inputs = changed(self.params, self.stamps) if self.params else [], list(self.inputs)
        if list(map(VERSION, inputs)) != self.versions[: len(inputs)] and self.rule is not None:
            for index, (x, version) in enumerate(zip(inputs, self.versions, strict=False)):
                if x._version != version and self.rule.reads_values:
                    inputs[index] = self.unchanged(index, self.rule)
        form, known = (self.shifted, *self.used, *gone), self.cached
        if known is None or known[0] != form or not all(map(is_, inputs, known[1])):
            call = self.call_on(inputs, gone)
            call.drawn = self.drawn
            known = self.cached = form, inputs, call
        return known[2]

    def call_on(self, inputs: list[Tensor], gone: Sequence[str] = ()) -> Call:
        """The call with these tensors as inputs, as the rule sees them; the values of parameters may be `gone`."""
        params = self.params
        if gone:
            params = {**params, **{name: Changed.of(self.where, name, params[name]) for name in gone}}
        binding, axes = self.binding, (self.shifted,)
        options = self.hyperparameters.as_called(binding.options)
        moved = self.shifted or binding.axes or binding.out_axes
        if self.whole:
            return Call(options, [x[None] for x in inputs], params, self.output)
        if not moved and len(self.used) == 1:  # all tensors are as they are
            out = self.results[self.used[0]]
            return Call(options, inputs, params, out, used={self.used[0]: out.shape[1:]})
        assert self.rule is not None
        if self.shifted:
            binding = Binding(binding.options, (), axes * len(inputs), axes * (1 + max(self.results)))
        with torch.enable_grad():  # whoever asks first: what is moved has a graph
            output, shapes = self.rule.join(binding, {**self.results}, self.used or list(self.results)[:1])
            return Call(options, binding.seen(inputs), params, output, used=shapes)

    def unchanged(self, index: int, rule: Rule) -> Tensor:
        """An input, or in its place the output of a layer that works in place and needs no more than that."""
        x = self.inputs[index]
        if x._version <= self.versions[index]:
            return x
        if not rule.from_output or self.output._version > self.versions[len(self.inputs)]:
            raise runtime_error(
                f"Input {index} of {self.where} was changed in place after the layer had read it.",
                "its Jacobian would be computed from the wrong values.",
                "replace the in-place operation that follows (for example 'x += y' by 'x = x + y').",
            )
        return self.output

    def add_up(self, rule: Rule, weights: Tensor) -> None:
        """Become the call of the sum of what a loss has returned times weights, which are its last input."""
        if self.terms is None:
            self.terms = self.output
            self.edges = (*self.edges, (None, 0))
            if self.binding.axes:
                self.binding.axes = (*self.binding.axes, 0)
        given = self.inputs[: len(self.edges) - 1]
        (place,) = self.places
        self.places, self.used = {place: 0}, [0]
        self._inputs, self._results = (*given, weights), {0: (self.terms * weights).sum()}
        self.versions = [*self.versions[: len(given)], weights._version, 0]
        self.rule, self.cached = rule, None

    def sent(self, factor: Tensor) -> Tensor:
        """What a loss with this factor in the objective sends to its node in the graph, where its terms may be."""
        return factor if self.terms is None else factor * self.inputs[-1]

    def reopen(self) -> None:
        """Another backward pass may come: this use of the parameters is to be expected again."""
        self.open = not self.released

    def put_away(self) -> None:
        """The pass is over, and another one may come: what can be computed again is dropped."""
        self.reopen()
        if self.recomputed is not None:
            self.drop()
            self.cached = None

    def close(self) -> None:
        """This use of the parameters is over."""
        self.open = False

    def release(self, keeps_fields: bool = False) -> None:
        """Let go of the tensors of the forward pass, also of those left on the module unless it `keeps_fields`."""
        self.open, self.released = False, True
        if self.params:
            LIVE.discard(weakref.ref(self))
        if not keeps_fields and self.stored is not None:
            forget(self.module, self.stored)
        self.stored = self.terms = self.recomputed = None  # the graph owns the record until the loss is let go
        self._inputs, self._results, self.cached, self.stamps = (), {}, None, []
        if self.binding.options is not self.module:  # arguments of the call
            self.binding = Binding(None, (), self.binding.axes, self.binding.out_axes)


def calls_by_parameter() -> dict[int, list[weakref.ref[Record]]]:
    """By `id(parameter)`: the calls that use it."""
    found: dict[int, list[weakref.ref[Record]]] = {}
    for ref in LIVE.copy():
        record = ref()
        for p in record.params.values() if record is not None else ():
            found.setdefault(id(p), []).append(ref)
    return found
