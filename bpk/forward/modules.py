"""Modules within a forward pass with carriers: those with a rule are answered by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from bpk.forward.carrier import carriers, require_unchanged, values, versions_of, without_constants
from bpk.forward.rules import answer
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.recording.parameters import read_parameters
from bpk.rules import REGISTRY


@contextmanager
def rules_answer(model: nn.Module) -> Iterator[None]:
    """Inside, rules stand in the place of `forward` of their modules where these are given carriers."""
    placed: list[nn.Module] = []
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                what = f"Taylor coefficients cannot pass {type(module).__name__}, which is compiled by torch.jit."
                raise UnsupportedLayer(what, "its code does not run in Python.", "give the module itself.")
            rule = REGISTRY.find(module)
            if rule is None or isinstance(rule, Loss) or "forward" in vars(module):
                continue
            module.forward = answered(module, rule)
            placed.append(module)
        yield
    finally:
        for module in placed:
            del module.forward


def answered(module: nn.Module, rule: Rule) -> Callable[..., Any]:
    """What takes the place of a module's `forward`: its results, with their coefficients."""
    forward = module.forward

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        in_place = bool(vars(module).get("inplace", False))
        if not in_place:
            args, kwargs = without_constants((args, kwargs))
        moving = carriers((args, kwargs))
        if not moving or in_place or not torch.is_grad_enabled() or read_parameters(module, rule) is None:
            return forward(*args, **kwargs)
        propagation = moving[0].propagation
        before = RandomState.now(moving[0].series.value.device)
        with propagation.computing():
            versions = versions_of(moving)
            result = forward(*values(args), **values(kwargs))
            require_unchanged(type(module).__name__, moving, versions)
            ruled = None if before.moved() else answer(propagation, rule, module, args, kwargs, result)
        if ruled is not None:
            return ruled
        before.restore()
        return forward(*args, **kwargs)  # function by function

    return called
