"""The forward pass of losses that users compose of others: recorded as a whole, unless their parts tell everything."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from torch.autograd.graph import Node

from bpk.jacobians.core.engine import untraced
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.losses.loss import Loss, is_loss
from bpk.jacobians.second_order.graph import between
from bpk.recording.context.state import CTX
from bpk.recording.graph.nodes import is_linear
from bpk.recording.graph.ownership import leave_to_autograd, owner_of
from bpk.recording.recorder import record
from bpk.recording.unrecorded import is_seen


@untraced
def record_composed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a module that trains no parameters, was extended by itself, and has modules inside.

    If it returns a weighted sum of losses inside, these are recorded already. Otherwise (a penalty, a power, weights
    of the terms of a loss with `reduction="none"`) it is recorded as one loss, and what is inside is left to autograd.
    """
    if not is_seen() or not is_loss(module, output) or not output.requires_grad:
        return None
    outside = {x.grad_fn for x in tensors_in((args, kwargs)) if x.grad_fn is not None}
    if CTX.disabled or is_sum_of_losses(output.grad_fn, outside):
        return None
    for node in between(output.grad_fn, outside.__contains__):
        found = owner_of(node)
        if found is not None:
            leave_to_autograd(found, node)
    return record(module, args, kwargs, output)


def is_sum_of_losses(node: Node, outside: Container[Node]) -> bool:
    """Whether every way from the result to the arguments passes a recorded loss, through linear functions only."""
    found = between(node, is_recorded_loss)
    return all(here not in outside and owner_of(here) is None and is_linear(here) for here in found)


def is_recorded_loss(node: Node) -> bool:
    """Whether a node gave the result of a loss with a rule: one number, which second order can start at."""
    found = owner_of(node)
    return found is not None and isinstance(found.rule, Loss) and found.output.dim() == 0
