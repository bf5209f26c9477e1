"""The forward pass of losses that users compose of others: recorded as a whole, unless their parts tell everything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from bpk.jacobians.losses.autodiff_loss import is_loss
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.losses.loss_call import tensors_anywhere
from bpk.recording import engine
from bpk.recording.graph_nodes import is_linear
from bpk.recording.record import leave_to_autograd, owner_of
from bpk.recording.recorder import record
from bpk.recording.state import CTX


def record_composed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a module without parameters that was extended by itself, and has modules inside.

    If it returns a weighted sum of losses inside, these are recorded already. Otherwise (a penalty, a power) it is
    recorded as one loss, and what is inside is left to autograd.
    """
    skip = CTX.quiet or not torch.is_grad_enabled() or engine.is_transformed()
    if skip or not is_loss(module, output) or not output.requires_grad:
        return None
    outside = beginnings((args, kwargs))
    if CTX.disabled or is_sum_of_losses(output.grad_fn, outside):
        return None
    for node in upstream(output.grad_fn, outside.__contains__):
        found = owner_of(node)
        if found is not None and node not in outside:
            leave_to_autograd(found, node)
    return record(module, args, kwargs, output)


def is_sum_of_losses(node: Node, outside: Collection[Node]) -> bool:
    """Whether every way from the result to the arguments passes a recorded loss, through linear functions only."""
    between = (here for here in upstream(node, is_recorded_loss) if not is_recorded_loss(here))
    return all(here not in outside and owner_of(here) is None and is_linear(here) for here in between)


def is_recorded_loss(node: Node) -> bool:
    """Whether a node gave the result of a loss with a rule."""
    found = owner_of(node)
    return found is not None and isinstance(found.rule, Loss)


def upstream(node: Node, is_end: Callable[[Node], bool]) -> Iterator[Node]:
    """A node and all that autograd's graph has behind it, up to the first ends on each way (included)."""
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        yield here
        if is_end(here):
            continue
        for above, _ in here.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                waiting.append(above)


def beginnings(arguments: Any) -> set[Node]:
    """The nodes of the tensors among the arguments."""
    return {x.grad_fn for x in tensors_anywhere(arguments) if x.grad_fn is not None}
