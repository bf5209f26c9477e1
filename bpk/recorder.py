"""The forward pass: write down each call of an extended layer, and leave a hook on its output."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk import engine
from bpk.context import CTX
from bpk.jacobians.errors import explain
from bpk.records import DISSOLVED, INPUT_NAMES, OWNER, Edge, Record, Visit
from bpk.rules import REGISTRY

UNRECORDED = object()
"""Stashed where a layer changes a view in place: autograd then rebuilds the graph around the viewed tensor, so the
layer is left to autograd as part of the stretch between two recorded calls."""


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
