"""Calls that are not recorded: what they leave behind nevertheless."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.errors import explain, runtime_error
from bpk.jacobians.losses.loss_call import trains
from bpk.recording import engine
from bpk.recording.activations import store_on
from bpk.recording.context.state import CTX
from bpk.recording.graph.ownership import TakingAway
from bpk.recording.hooks_for_all import all_hooks
from bpk.recording.membership import path_of, where_is


def is_seen() -> bool:
    """Whether what runs now is a forward pass of the user's, and builds a graph."""
    if CTX.quiet and engine.checkpointing() is None:  # what runs again saves what it has saved before
        return False
    return torch.is_grad_enabled() and not engine.is_transformed()


def comes_late(module: nn.Module, recorder: Callable[..., Any], results: Sequence[Tensor]) -> bool:
    """Whether a hook that was put in front of the recorder has run, and may have changed the output.

    In the next call the recorder comes first, except before hooks for all modules: what these do is watched.
    """
    if engine.GLOBAL_FORWARD_HOOKS and (CTX.watch is None or CTX.watch.is_changed(module, results)):
        return True
    hooks = module._forward_hooks
    if next(iter(hooks.values()), None) is recorder:
        return False
    mine = next((key for key, hook in hooks.items() if hook is recorder), None)
    if mine is None:  # a loss of the user's, whose recorder calls this one
        return False
    hooks.move_to_end(mine, last=False)  # type: ignore[attr-defined]
    return True


def changed_by_hook(module: nn.Module) -> str:
    """Why a loss that a hook has changed is none."""
    hooks = all_hooks(CTX.watch)
    if hooks:
        who = f"a hook for all modules (register_module_forward_hook), {hooks}, runs before"
        do = "remove the hook, let it leave losses as they are (return None)"
    else:
        who = "a forward hook that was put in front (prepend=True) ran before"
        do = "run the forward pass again (from the next one on, the loss is seen first)"
    return explain(
        f"The loss {where_is(module)} was not seen as a loss.",
        f"{who} bpk's own, and may have changed what it returned; second-order quantities start at what the loss "
        "itself returns.",
        f"{do}, or use first-order extensions.",
    )


def holds_loss(module: nn.Module, output: Any, results: Mapping[int, Tensor]) -> bool:
    """Whether a module that trains no parameters has returned a differentiable number beside other things."""
    if isinstance(output, Tensor) or trains(module):
        return False
    return any(not x.dim() for x in results.values())


def returns_more(module: nn.Module) -> str:
    """Why what returns a loss beside other things is none."""
    return explain(
        f"{where_is(module)} was not seen as a loss.",
        "it returns several things, and a loss returns one number: second-order quantities start there.",
        "return the number alone, and keep the others as attributes (self.accuracy = ...), or use first-order "
        "extensions.",
    )


def leave_reason(message: str, results: Sequence[Tensor]) -> None:
    """On the results of what is no loss, though its user may take it for one: let a pass that misses it know why."""
    for result in results:
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(partial(note_reason, message))


def note_reason(message: str, grads: tuple[Tensor | None, ...]) -> None:
    """The hook on the result of such a loss."""
    if CTX.get_active_exts() and not CTX.quiet:
        CTX.no_loss = message


def note_transform(module: nn.Module) -> None:
    """Note a layer that is not seen because the user has started a transform of `torch.func`."""
    if torch.is_grad_enabled() and engine.is_transformed() and not (CTX.quiet or CTX.disabled):
        CTX.transformed = path_of(module)


def leave_unrecorded(
    module: nn.Module, inputs: Sequence[Tensor], results: Sequence[Tensor], overwritten: Tensor | None, as_given: bool
) -> None:
    """Leave inputs and output on a module whose call is not recorded; `overwritten` is an input as it was.

    If results have a graph, a backward pass that comes to one of them takes them away. If the layer has returned what
    it was given, `as_given`, its extension hook comes first.
    """
    stored = store_on(module, inputs if overwritten is None else (overwritten, *inputs[1:]), results[0])
    take_away = (ComingPast if as_given else TakingAway)(module, stored)
    nodes = dict[Node, None]()
    for result in results:
        whole = result._base if result._is_view() else result  # what was changed in place lives on in the viewed tensor
        node = result.grad_fn if whole is None or whole.grad_fn is None else whole.grad_fn
        if node is not None:
            nodes[node] = None
    for node in nodes:
        node.register_prehook(take_away)


class ComingPast(TakingAway):
    """The same on what a layer has returned as it was given: a context may have something to do at each layer."""

    __slots__ = ()

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        opened = CTX.stack[-1] if CTX.stack and not CTX.quiet else None
        if opened is not None and opened.asks_for_layers:
            opened.pass_on(CTX.called, self.module)
        super().__call__(grads)


def leave_note(module: nn.Module, results: Sequence[Tensor]) -> None:
    """Under `disable`: make a later backward pass with active extensions fail with the reason."""
    differentiable = next((x for x in results if x.requires_grad), None)
    if differentiable is not None and differentiable.grad_fn is not None:
        differentiable.grad_fn.register_prehook(partial(complain, path_of(module)))


def complain(path: str, grads: tuple[Tensor | None, ...]) -> None:
    """The hook that a forward pass under `disable` leaves: it complains if something is missing that was not stored."""
    if CTX.get_active_exts() and not CTX.quiet:
        raise runtime_error(
            f"The forward pass of '{path}' ran under bpk.disable().",
            "nothing was stored that the active extensions could use.",
            "run the forward pass outside of disable(), or backward() outside of backpack(...).",
        )
