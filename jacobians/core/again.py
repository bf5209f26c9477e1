"""A module called again, at other inputs and parameters: users' backward hooks are not part of what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core import engine


def call_again(
    module: Any, params: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """`torch.func.functional_call` without the hooks of `register_full_backward_hook` and its like."""
    with without_backward_hooks(module):
        return torch.func.functional_call(module, dict(params), args, dict(kwargs or {}))


@contextmanager
def without_backward_hooks(module: nn.Module) -> Iterator[None]:
    """Let a module, and all inside, put no hooks into the graph."""
    every = [hooks for m in module.modules() for hooks in (m._backward_hooks, m._backward_pre_hooks)]
    every += engine.global_backward_hooks()
    taken = [(hooks, dict(hooks)) for hooks in every if hooks]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)
