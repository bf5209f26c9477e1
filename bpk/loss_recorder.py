"""The forward pass of losses that users compose of others: recorded as a whole, unless their parts tell everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk import engine
from bpk.context import CTX
from bpk.jacobians.autodiff_loss import is_loss
from bpk.jacobians.loss import Loss
from bpk.jacobians.loss_call import tensors_anywhere
from bpk.recorder import record
from bpk.records import OWNER, Record, leave_to_autograd

SUMS = ("Add", "Sub", "Neg", "Sum", "Mean", "Stack", "Cat", "Select", "Unbind", "View", "ToCopy")
"""What autograd calls linear functions of losses."""

PRODUCTS = ("Mul", "Div")
"""And those that are linear if the other factor is a constant."""


def record_composed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a module without parameters that was extended by itself, and has modules inside.

    If it returns a weighted sum of losses inside, these are recorded already. Otherwise (a penalty, a power) it is
    recorded as one loss, and what is inside is left to autograd.
    """
    skip = CTX.quiet or not torch.is_grad_enabled() or engine.is_transformed()
    if skip or not is_loss(module, output) or not output.requires_grad:
        return None
    if CTX.disabled or is_sum_of_losses(output.grad_fn, (args, kwargs)):
        return None
    for node in inside(output.grad_fn, (args, kwargs)):
        found = owner(node)
        if found is not None:
            leave_to_autograd(found, node)
    return record(module, args, kwargs, output)


def is_sum_of_losses(node: Node, arguments: Any) -> bool:
    """Whether every way from the result to the arguments passes a recorded loss, through linear functions only."""
    outside = beginnings(arguments)
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        found = owner(here)
        if found is not None and isinstance(found.rule, Loss):
            continue
        if here in outside or found is not None or not is_linear(here):
            return False
        above = [n for n, _ in here.next_functions if n is not None and n not in seen]
        seen.update(above)
        waiting += above
    return True


def is_linear(node: Node) -> bool:
    """Whether autograd's function at a node is linear in all that is differentiable."""
    name = node.name().removesuffix("0").removesuffix("Backward")
    several = sum(n is not None for n, _ in node.next_functions) > 1
    return name in SUMS or (name in PRODUCTS and not several)


def inside(node: Node, arguments: Any) -> Iterator[Node]:
    """The nodes between the result and the arguments."""
    outside = beginnings(arguments)
    waiting, seen = [node], {node, *outside}
    while waiting:
        here = waiting.pop()
        yield here
        above = [n for n, _ in here.next_functions if n is not None and n not in seen]
        seen.update(above)
        waiting += above


def beginnings(arguments: Any) -> set[Node]:
    """The nodes of the tensors among the arguments."""
    return {x.grad_fn for x in tensors_anywhere(list(arguments)) if isinstance(x, Tensor) and x.grad_fn is not None}


def owner(node: Node) -> Record | None:
    """The recorded call whose result this node gave."""
    found = engine.belongings(node).get(OWNER)
    return found if isinstance(found, Record) else None
