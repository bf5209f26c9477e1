"""Tensors that nodes of autograd's graph keep, also where a checkpoint has to compute them again.

A checkpoint gives out what it has computed again once in each backward pass, and the pass under way needs that for
itself. So it is asked in a pass of its own, for which it computes everything once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.graph import Node

from bpk.jacobians.core.engine import is_checkpointed
from bpk.recording import engine
from bpk.recording.context.state import CTX

T = TypeVar("T")


def kept_by(node: Node, *names: str) -> list[Any]:
    """What a node keeps under some names."""
    if not any(is_checkpointed(node, name) for name in names):
        return [engine.saved(node, name) for name in names]
    return in_own_pass(lambda: [engine.saved(node, name) for name in names])


def in_own_pass(ask: Callable[[], list[T]]) -> list[T]:
    """What a function finds that reads what nodes keep, or runs them: all nodes are evaluated in such a pass."""
    found = list[T]()
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True, device="cpu")
        end = start.clone()
    end.register_hook(lambda grad: found.extend(ask()))
    with CTX.aloud():  # what runs again saves what it has saved before, for recorded calls, too
        end.backward()
    return found
