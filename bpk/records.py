"""A record: what is known of one call of an extended layer, from its forward pass to its backward pass.

A record lives exactly as long as the autograd graph does, because the graph node of the layer's output owns it.
It holds no reference back to that node (the output is kept detached), so dropping the loss or the model frees
everything.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk import engine
from bpk.context import CTX
from bpk.jacobians.binding import Binding
from bpk.jacobians.call import Call, Options
from bpk.jacobians.errors import explain
from bpk.jacobians.random_state import RandomState
from bpk.jacobians.rule import Rule, add_up
from bpk.ports import PLAIN, Port

OWNER = "bpk.record"
"""Key under which a graph node owns the record of the layer call that produced it."""

LEFT = "bpk.left"
"""Key under which a graph node says that its call was left to autograd, and whether the call had a rule."""

OPEN_USES: Counter[int] = Counter()
"""By `id(parameter)`: how many recorded calls that use it still await their backward pass."""

NOTHING = torch.empty(0)
"""Stands in for tensors that were let go."""

Edge = tuple[Node | None, int]


DISSOLVED = nn.Identity()
"""The module of a record that was dissolved."""


INPUT_NAMES = tuple(f"input{k}" for k in range(16))
"""Under which names the inputs of a layer are left on it."""


def forget(module: nn.Module) -> None:
    """Remove the tensors that `record` left on a module (`input0`, ..., `output`)."""
    fields = module.__dict__
    fields.pop("output", None)
    for name in INPUT_NAMES:
        if fields.pop(name, None) is None:
            break


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
    of them an output of the graph node is. `used` are those that something behind the call has asked for.
    `differentiated` says whether a gradient through the call has been made with a graph of its own. `rows` are
    axes that autograd's graph sees as one, in front of inputs and results (of calls written down from the graph).
    """

    __slots__ = (
        "binding",
        "differentiated",
        "drawn",
        "edges",
        "inputs",
        "is_view",
        "module",
        "open",
        "params",
        "places",
        "results",
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
        params: dict[str, Tensor] | None = None,
        rows: tuple[int, ...] = (),
    ) -> None:
        self.module = module
        self.rule = rule
        self.binding = binding
        self.differentiated = False
        self.inputs = inputs
        self.edges = edges
        self.results = results
        self.places = places
        self.used: list[int] = [] if len(results) > 1 else list(results)
        self.is_view = False
        self.training = module.training
        self.shifted = 0
        self.drawn: RandomState | None = None
        self.seen: tuple[tuple[int, ...], list[Tensor], Call] | None = None
        self.versions = [x._version for x in (*inputs, *results.values())]
        self.params = parameters_of(module, rule) if params is None else params
        self.rows = rows
        self.open = True
        for p in self.params.values():
            OPEN_USES[id(p)] += 1

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
        return self.module.__dict__.get("_bpk_path", "") or type(self.module).__name__

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
        if x._version == self.versions[index]:
            return x
        if not rule.from_output or self.output._version != self.versions[len(self.inputs)]:
            raise RuntimeError(
                explain(
                    f"Input {index} of '{self.path}' ({type(self.module).__name__}) was changed in place after the "
                    "layer had read it.",
                    "its Jacobian would be computed from the wrong values.",
                    "replace the in-place operation that follows (for example 'x += y' by 'x = x + y').",
                )
            )
        return self.output

    def shares(self, param: Tensor, held: Set[int]) -> bool:
        """Whether calls that are still to come, or functions (parameters `held`, by `id`), use a parameter as well."""
        return OPEN_USES[id(param)] - self.open > 0 or id(param) in held

    def reopen(self) -> None:
        """Another backward pass may come: this use of the parameters is to be expected again."""
        if not self.open and not self.released:
            self.open = True
            for p in self.params.values():
                OPEN_USES[id(p)] += 1

    def close(self) -> None:
        """This use of the parameters is over."""
        if self.open:
            self.open = False
            for p in self.params.values():
                OPEN_USES[id(p)] -= 1
                if OPEN_USES[id(p)] <= 0:
                    del OPEN_USES[id(p)]

    def release(self) -> None:
        """Let go of the tensors of the forward pass."""
        self.close()
        if self.output is self.module.__dict__.get("output"):
            forget(self.module)
        self.inputs, self.results, self.seen, self.binding = (), {}, None, self.binding.without_tensors()

    @property
    def released(self) -> bool:
        """Whether the tensors are gone."""
        return not self.results

    def __del__(self) -> None:
        self.close()


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
        CTX.visit(self.record, grads)
        return None
