"""A record: what is known of one call of an extended layer, from its forward pass to its backward pass.

A record lives exactly as long as the autograd graph does, because the graph node of the layer's output owns it.
It holds no reference back to that node (the output is kept detached), so dropping the loss or the model frees
everything.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.errors import explain
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.rule import Rule, add_up
from bpk.recording import engine
from bpk.recording.activations import forget, leave_on
from bpk.recording.graph_nodes import Edge
from bpk.recording.ports import PLAIN, Port
from bpk.recording.recomputed import Recomputed
from bpk.recording.state import CTX

OWNER = "bpk.record"
"""Key under which a graph node owns the record of the layer call that produced it."""

LEFT = "bpk.left"
"""Key under which a graph node says that its call was left to autograd, and whether the call had a rule."""

LIVE: set[weakref.ref[Record]] = set()
"""The records that exist. They say themselves whether they still await a backward pass."""

NOTHING = torch.empty(0)
"""Stands in for tensors that were let go."""

DISSOLVED = nn.Identity()
"""The module of a record that was dissolved."""


def path_of(module: nn.Module) -> str:
    """Where a layer sits in the extended model, for messages."""
    return module.__dict__.get("_bpk_path", "") or type(module).__name__


def parameters_of(module: nn.Module, rule: Rule | None) -> dict[str, Tensor]:
    """The parameters that a rule names (also where a parametrisation computes them), or all direct ones."""
    own = module._parameters
    if rule is None:
        return {name: p for name, p in own.items() if p is not None}
    found = {name: own[name] if name in own else attrgetter(name)(module) for name in rule.params_of(module)}
    return {name: p for name, p in found.items() if p is not None}


class Record:
    """One recorded call of a layer: module, rule, inputs, results, and the edges towards its inputs.

    `binding` says how the rule sees them. `results` are those that are differentiable, by number; `places` says which
    of them an output of the graph node is. `used` are those that something behind the call has asked for. `given` are
    the shapes of the tensors with which the whole model was called. `contexts` are those that the thread of the forward
    pass is in. `handed` refers to the tensors that the layer was given and has returned, for as long as they live.
    Where `hooks` are given, tensors are computed again on demand. `rows` are axes that autograd's graph sees as one, in
    front of inputs and results (of calls written down from the graph).
    """

    __slots__ = (
        "__weakref__",
        "_inputs",
        "_results",
        "binding",
        "contexts",
        "drawn",
        "edges",
        "given",
        "handed",
        "left",
        "module",
        "open",
        "params",
        "places",
        "recomputed",
        "rows",
        "rule",
        "seen",
        "shifted",
        "training",
        "used",
        "versions",
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
        rows: tuple[int, ...] = (),
    ) -> None:
        self.module = module
        self.rule = rule
        self.contexts = CTX.entered
        for opened in self.contexts[-1:]:
            opened.recorded = True
        self.binding = binding
        self.handed: list[weakref.ref[Tensor]] = []
        self._inputs: tuple[Tensor, ...] | None = inputs
        self.edges = edges
        self._results: dict[int, Tensor] | None = results
        self.places = places
        self.used: list[int] = [] if len(results) > 1 else list(results)
        self.given = CTX.given
        self.training = module.training
        self.shifted = 0
        self.drawn: RandomState | None = None
        self.seen: tuple[tuple[int, ...], list[Tensor], Call] | None = None
        self.versions = [x._version for x in (*inputs, *results.values())]
        self.params = parameters_of(module, rule) if params is None else params
        self.rows = rows
        self.left: Tensor | None = None
        self.recomputed: Recomputed | None = None
        if hooks is not None:
            self.recomputed = Recomputed(hooks, (*inputs, *results.values()))
            self._inputs, self._results, self.binding = None, None, dataclasses.replace(binding, inputs=())
        self.open = True
        if self.params:
            LIVE.add(weakref.ref(self, LIVE.discard))

    # ---- its tensors -------------------------------------------------------------------------------
    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the layer was given."""
        if self._inputs is None:
            self.compute_again()
        return self._inputs or ()

    @property
    def results(self) -> dict[int, Tensor]:
        """What it returned, by number."""
        if self._results is None:
            self.compute_again()
        return self._results or {}

    def compute_again(self) -> None:
        """Get the tensors of a call inside of `torch.utils.checkpoint`."""
        assert self.recomputed is not None
        with CTX.aloud():
            found = self.recomputed.tensors()
        numbers = list(self.places.values())
        self._inputs = tuple(found[: -len(numbers)])
        self._results = dict(zip(numbers, found[-len(numbers) :], strict=True))

    def leave(self) -> None:
        """Leave what user-written module extensions read on the layer."""
        self.left = leave_on(self.module, self.inputs, self.output)

    # ---- how the rule sees it ----------------------------------------------------------------------
    @property
    def problem(self) -> str:
        """Why the rule cannot serve this call (`""`: it can)."""
        return self.binding.problem

    @property
    def output(self) -> Tensor:
        """The first result."""
        return next(iter(self.results.values())) if self.results else NOTHING

    @property
    def largest(self) -> int:
        """The number of entries of what is used of the results."""
        return max(1, sum(self.results[k].numel() for k in self.used))

    @property
    def plain(self) -> bool:
        """Whether the rule sees all tensors as they are."""
        binding = self.binding
        moved = self.shifted or binding.axes or binding.out_axes or binding.options is not self.module
        return not moved and len(self.used) == 1

    def use(self, number: int) -> None:
        """Something behind the call depends on this result."""
        if number not in self.used:
            self.used = sorted((*self.used, number))

    @property
    def knows_batch(self) -> bool:
        """Whether the layer itself says which axis is the batch axis."""
        return bool(self.binding.axes)

    def shift(self, axis: int) -> None:
        """The batch axis is not in front, but here (in all inputs and results)."""
        self.shifted = axis

    def axis(self, index: int) -> int:
        """The batch axis of an input."""
        return self.shifted or self.binding.axis(index) or 0

    def out_axis(self, number: int) -> int:
        """The batch axis of a result."""
        return self.shifted or self.binding.out_axis(number)

    def entrance(self, index: int) -> Port:
        """How an input is connected."""
        axis = self.axis(index)
        return Port(axis, rows=self.rows) if axis or self.rows else PLAIN

    def exit(self, number: int, used: Sequence[int] | None = None) -> Port:
        """How a result is connected, where these results are used (by default: those that are)."""
        used = self.used if used is None else used
        if len(used) == 1:
            axis = self.out_axis(number)
            return Port(axis, rows=self.rows) if axis or self.rows else PLAIN
        shapes = {k: self.shape_of(k) for k in used}
        sizes = [shape.numel() for shape in shapes.values()]
        start = sum(sizes[: used.index(number)])
        return Port(self.out_axis(number), shapes[number], start, sum(sizes))

    def relaid(self, mat: Tensor, before: Sequence[int]) -> Tensor:
        """Columns at the results that were used before, as columns at those that are used now."""
        return add_up([self.exit(k).to_rule(self.exit(k, before).to_graph(mat)) for k in before])

    def shape_of(self, number: int) -> torch.Size:
        """The shape `[*out]` of one sample of a result."""
        shape, axis = self.results[number].shape, self.out_axis(number)
        return torch.Size((*shape[:axis], *shape[axis + 1 :]))

    def gradient(self, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """The gradient of the output as the rule sees it, from those of the graph node's outputs."""
        if len(self.results) == 1:
            ((nr, number),) = self.places.items()
            grad = grads[nr]
            return None if grad is None else self.exit(number).one_to_rule(grad)
        known = {number: grads[nr] for nr, number in self.places.items() if grads[nr] is not None}
        for number in known:
            self.use(number)
        found = [self.exit(number).one_to_rule(g) for number, g in known.items() if g is not None]
        return add_up(found) if found else None

    @property
    def path(self) -> str:
        """Where the layer sits in the extended model, for messages."""
        return path_of(self.module)

    @property
    def batch_size(self) -> int:
        """`N`."""
        for k, x in enumerate(self.inputs):
            if x.dim() and (not self.binding.axes or self.binding.axes[k] is not None):
                return x.shape[self.axis(k)]
        return 1

    def call(self) -> Call:
        """What the rule gets to see; refuses if a saved tensor was overwritten since."""
        inputs = list(self.inputs)
        if self.rule is not None and self.rule.reads_values:
            inputs = [self.unchanged(k, self.rule) for k in range(len(inputs))]
        form = (self.shifted, *self.used)
        same = self.seen is not None and self.seen[0] == form
        if self.seen is None or not same or any(x is not y for x, y in zip(inputs, self.seen[1], strict=True)):
            with torch.enable_grad():  # whoever asks first: what is moved keeps its graph
                self.seen = form, inputs, self.call_on(inputs)
            self.seen[2].drawn = self.drawn
        return self.seen[2]

    def call_on(self, inputs: list[Tensor]) -> Call:
        """The call with these tensors as inputs, as the rule sees them."""
        if self.plain:
            number, out = self.used[0], self.results[self.used[0]]
            return Call(self.in_mode(self.module), inputs, self.params, out, used={number: out.shape[1:]})
        used = self.used or list(self.results)[:1]
        assert self.rule is not None
        if self.shifted:
            results = {k: self.results[k].movedim(self.shifted, 0) for k in used}
            output, shapes = self.rule.join(Binding(self.module, ()), results, used)
            seen = [x.movedim(self.shifted, 0) for x in inputs]
            return Call(self.in_mode(self.module), seen, self.params, output, used=shapes)
        output, shapes = self.rule.join(self.binding, {**self.results}, used)
        return Call(self.in_mode(self.binding.options), self.binding.seen(inputs), self.params, output, used=shapes)

    def in_mode(self, options: Options) -> Options:
        """The options of the call as they were: training or evaluation may have been switched since."""
        if not isinstance(options, nn.Module) or options.training == self.training:
            return options
        as_called = copy.copy(options)  # shares parameters and buffers
        as_called.training = self.training
        return as_called

    def unchanged(self, index: int, rule: Rule) -> Tensor:
        """An input, or in its place the output of a layer that works in place and needs no more than that."""
        x = self.inputs[index]
        if x._version <= self.versions[index]:
            return x
        if not rule.from_output or self.output._version > self.versions[len(self.inputs)]:
            raise RuntimeError(
                explain(
                    f"Input {index} of '{self.path}' ({type(self.module).__name__}) was changed in place after the "
                    "layer had read it.",
                    "its Jacobian would be computed from the wrong values.",
                    "replace the in-place operation that follows (for example 'x += y' by 'x = x + y').",
                )
            )
        return self.output

    def keep_output(self) -> None:
        """The output is about to be overwritten: keep a copy where it stands in for an input that it overwrote."""
        if self.rule is None or not self.rule.from_output or self.recomputed is not None:
            return
        out = self.output
        if not any(x.is_set_to(out) for x in self.inputs):
            return
        number = next(iter(self.results))
        self.results[number] = out.clone()
        self.versions[len(self.inputs)] = self.results[number]._version
        if self.left is not None and self.module.__dict__.get("output") is self.left:
            self.leave()

    def reopen(self) -> None:
        """Another backward pass may come: this use of the parameters is to be expected again."""
        self.open = not self.released

    def put_away(self) -> None:
        """The pass is over, and another one may come: what can be computed again is dropped."""
        self.reopen()
        if self.recomputed is not None:
            self._inputs, self._results, self.seen = None, None, None

    def close(self) -> None:
        """This use of the parameters is over."""
        self.open = False

    def release(self, keeps_fields: bool = False) -> None:
        """Let go of the tensors of the forward pass, also of those left on the module unless it `keeps_fields`."""
        self.close()
        LIVE.discard(weakref.ref(self))
        if not keeps_fields and self.left is not None:
            forget(self.module, self.left)
        self._inputs, self._results, self.seen, self.binding = (), {}, None, self.binding.without_tensors()
        self.recomputed = None

    @property
    def released(self) -> bool:
        """Whether the tensors are gone."""
        return self._results is not None and not self._results


def calls_by_parameter() -> dict[int, list[weakref.ref[Record]]]:
    """By `id(parameter)`: the calls that use it."""
    found: dict[int, list[weakref.ref[Record]]] = {}
    for ref in LIVE.copy():
        record = ref()
        for p in record.params.values() if record is not None else ():
            found.setdefault(id(p), []).append(ref)
    return found


def is_awaited(param: Tensor) -> bool:
    """Whether a recorded call that uses a parameter still awaits its backward pass."""
    calls = (ref() for ref in LIVE.copy())
    return any(c is not None and c.open and any(param is p for p in c.params.values()) for c in calls)


def owner_of(node: Node) -> Record | None:
    """The recorded call that a graph node belongs to."""
    record: Record | None = engine.belongings(node).get(OWNER)
    return record


def leave_to_autograd(record: Record, node: Node) -> None:
    """Forget a call: it becomes part of the plain autograd between two recorded calls."""
    record.close()
    if record.rule is not None and record.params:
        for inner in inside(node, record.edges):
            engine.belongings(inner)[LEFT] = True
    del engine.belongings(node)[OWNER]
    engine.belongings(node)[LEFT] = record.rule is not None
    if record.left is not None:
        node.register_prehook(Left(record.module, record.left))
    record.module = DISSOLVED


def inside(node: Node, edges: Sequence[Edge]) -> Iterator[Node]:
    """The nodes between the output of a call and its inputs."""
    seen = {edge[0] for edge in edges}
    waiting = [node]
    while waiting:
        for above, _ in waiting.pop().next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                waiting.append(above)
                yield above


class Visit:
    """The hook on a layer's output node: hands the layer's gradient to the active context."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if CTX.passing is self.record or self.record.module is DISSOLVED:
            return None
        if CTX.quiet:  # a product with a stretch of the graph that ends here: go no further
            return (None,) * len(grads)
        reach(self.record, grads)
        return None


def reach(record: Record, grads: tuple[Tensor | None, ...]) -> None:
    """A backward pass has reached a recorded call: let the active context work on it."""
    if CTX.stack and any(grads[nr] is not None for nr in record.places):
        CTX.stack[-1].visit(record, record.path, grads)
        return
    if record.contexts is not CTX.entered:
        for opened in record.contexts[-1:]:  # the thread that wrote the call down waits for it in a context
            opened.elsewhere = True
    if not engine.keeps_graph():
        record.release()


class Left:
    """The hook on the output of a call that is not recorded: a backward pass takes away what was left on the module.

    An extension hook that may read it comes first.
    """

    __slots__ = ("module", "output")

    def __init__(self, module: nn.Module, output: Tensor) -> None:
        self.module = module
        self.output = output

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if CTX.quiet or CTX.get_retain_graph() or engine.keeps_graph():
            return
        if CTX.get_extension_hook() is not None:
            engine.when_finished(self.forget)
        else:
            self.forget()

    def forget(self) -> None:
        """Remove what this call has left."""
        forget(self.module, self.output)
