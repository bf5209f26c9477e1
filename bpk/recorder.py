"""The forward pass: write down each call of an extended layer, and leave a hook on its output.

A `Record` lives exactly as long as the autograd graph does, because the graph node of the layer's
output owns it. It holds no reference back to that node (the output is kept detached), so dropping the
loss or the model frees everything.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk import engine
from bpk.context import CTX
from bpk.jacobians.call import Call
from bpk.jacobians.errors import explain
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY

OWNER = "bpk.record"
"""Key under which a graph node owns the record of the layer call that produced it."""

OPEN_USES: Counter[int] = Counter()
"""By `id(parameter)`: how many recorded calls that use it still await their backward pass."""

UNRECORDED = object()
"""Stashed where a layer changes a view in place: autograd then rebuilds the graph around the viewed tensor, so the
layer is left to autograd as part of the stretch between two recorded calls."""

NOTHING = torch.empty(0)
"""Stands in for tensors that were let go."""

Edge = tuple[Node | None, int]


class Keep(torch.autograd.Function):
    """Identity whose result shares memory and version with its input, but not its future.

    A tensor that is later changed in place moves on to a new graph node; this alias stays where the
    layer saw it, and stays differentiable (`create_graph`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def keep(x: Tensor) -> tuple[Tensor, Edge]:
    """An alias of `x` that in-place operations cannot move, and the graph edge that leads to `x`."""
    if not x.requires_grad:
        return x, (None, 0)
    kept = Keep.apply(x)
    return kept, kept.grad_fn.next_functions[0]


class Record:
    """One recorded call of a layer: module, rule, inputs, output, and the edges towards its inputs."""

    __slots__ = (
        "edges",
        "inputs",
        "is_view",
        "module",
        "open",
        "out_nr",
        "output",
        "params",
        "problem",
        "rule",
        "versions",
    )

    def __init__(
        self,
        module: nn.Module,
        rule: Rule | None,
        inputs: tuple[Tensor, ...],
        edges: tuple[Edge, ...],
        output: Tensor,
        out_nr: int,
        problem: str = "",
    ) -> None:
        self.module = module
        self.rule = rule
        self.inputs = inputs
        self.edges = edges
        self.output = output
        self.out_nr = out_nr
        self.problem = problem
        self.is_view = False
        self.versions = [x._version for x in (*inputs, output)]
        self.params = parameters_of(module, rule)
        self.open = True
        for p in self.params.values():
            OPEN_USES[id(p)] += 1

    @property
    def path(self) -> str:
        """Where the layer sits in the extended model, for messages."""
        return self.module.__dict__.get("_bpk_path", "") or type(self.module).__name__

    @property
    def batch_size(self) -> int:
        """`N`."""
        return self.inputs[0].shape[0] if self.inputs and self.inputs[0].dim() else 1

    def call(self) -> Call:
        """What the rule gets to see; refuses if a saved tensor was overwritten since."""
        if self.rule is None or not self.rule.reads_values:
            return Call(self.module, self.inputs, self.params, self.output)
        inputs = list(self.inputs)
        for k, (x, version) in enumerate(zip(inputs, self.versions, strict=False)):
            if x._version != version:
                if not self.rule.from_output or self.output._version != self.versions[-1]:
                    raise RuntimeError(
                        explain(
                            f"Input {k} of '{self.path}' ({type(self.module).__name__}) was changed in place after the "
                            "layer had read it.",
                            "its Jacobian would be computed from the wrong values.",
                            "replace the in-place operation that follows (for example 'x += y' by 'x = x + y').",
                        )
                    )
                inputs[k] = self.output
        return Call(self.module, inputs, self.params, self.output)

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
        self.inputs, self.output = (), NOTHING

    @property
    def released(self) -> bool:
        """Whether the tensors are gone."""
        return not self.inputs

    def __del__(self) -> None:
        self.close()


class Visit:
    """The hook on a layer's output node: hands the layer's gradient to the active context."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if CTX.passing is self.record or self.record.module is DISSOLVED:
            return None
        if CTX.quiet:  # a product with a stretch of the graph that ends here: go no further
            return tuple(None if g is None else torch.zeros_like(g) for g in grads)
        CTX.visit(self.record, grads[self.record.out_nr])
        return None


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
    names = own if rule is None else rule.params
    return {name: p for name in names if (p := own[name] if name in own else getattr(module, name)) is not None}


def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of every extended layer and loss."""
    fields = module.__dict__
    stashed = fields.pop("_bpk_stash", None)
    if stashed is UNRECORDED or CTX.quiet or engine.is_transformed():
        return None
    live = [
        t for t in ((output,) if isinstance(output, Tensor) else output) if isinstance(t, Tensor) and t.requires_grad
    ]
    if not live:
        return None
    out = live[0]
    if CTX.disabled:
        leave_note(module, out)
        return None
    if kwargs:
        args = tuple(inspect.signature(module.forward).bind(*args, **kwargs).arguments.values())
    tensors = [x for x in args if isinstance(x, Tensor)]
    kept = [stashed if stashed is not None and k == 0 else keep(x) for k, x in enumerate(tensors)]
    node = out.grad_fn
    same = stashed is None and any(out is x for x in tensors)
    replaced = same or node is None or OWNER in engine.belongings(node)
    if replaced:  # the layer returned its input (nn.Identity, Dropout in evaluation): give it a node of its own
        out = out.view_as(out)
        node = out.grad_fn
    elif out._is_view() and not shares_memory(out, tensors):
        out, replaced = Keep.apply(out), True  # no view of something internal, so that it may be changed in place
        node = out.grad_fn
    assert node is not None
    inputs, edges = tuple(x for x, _ in kept), tuple(edge for _, edge in kept)
    problem = "it has several differentiable outputs." if len(live) > 1 else ""
    made = Record(module, REGISTRY.find(module), inputs, edges, out.detach(), out.output_nr, problem)
    made.is_view = out._is_view()
    engine.belongings(node)[OWNER] = made
    node.register_prehook(Visit(made))
    for name, x in zip(INPUT_NAMES, inputs, strict=False):
        fields[name] = x.detach()
    fields["output"] = made.output
    if not replaced:
        return None
    return out if isinstance(output, Tensor) else tuple(out if t is live[0] else t for t in output)


def stash(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of layers that may work in place: keep the input that they will overwrite."""
    if not module.inplace or CTX.disabled or CTX.quiet or engine.is_transformed():
        return
    if not args or not args[0].requires_grad:
        return
    x = args[0]
    if x._is_view():
        dissolve(x.grad_fn)
        module.__dict__["_bpk_stash"] = UNRECORDED
        return
    kept, edge = keep(x)
    rule = REGISTRY.find(module)
    if rule is not None and not rule.from_output and torch.is_grad_enabled():
        kept = Keep.apply(x.clone())
    module.__dict__["_bpk_stash"] = (kept, edge)


def shares_memory(out: Tensor, inputs: list[Tensor]) -> bool:
    """Whether a view looks at memory that an input looks at, too."""
    return any(out._base is (x._base if x._is_view() else x) for x in inputs)


def dissolve(node: Node | None) -> None:
    """Forget the records of views that lead to a tensor which is about to be changed in place."""
    while node is not None:
        found = engine.belongings(node).get(OWNER)
        if found is not None and not found.is_view:
            return
        if found is not None:
            found.close()
            del engine.belongings(node)[OWNER]
            found.module = DISSOLVED
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None


DISSOLVED = nn.Identity()
"""The module of a record that was dissolved."""


class Forgotten:
    """The hook that a forward pass under `disable` leaves: it stores nothing and complains if it is needed."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        CTX.complain_if_active(
            explain(
                f"The forward pass of '{self.path}' ran under bpk.disable().",
                "nothing was stored that the active extensions could use.",
                "run the forward pass outside of disable(), or backward() outside of backpack(...).",
            )
        )


def leave_note(module: nn.Module, output: Tensor) -> None:
    """Under `disable`: make a later backward pass with active extensions fail with the reason."""
    if output.grad_fn is not None:
        path = module.__dict__.get("_bpk_path", "") or type(module).__name__
        output.grad_fn.register_prehook(Forgotten(path))
