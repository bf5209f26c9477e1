"""The hyperparameters of a layer as they were in a call: users may change them before the next one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import nn

from bpk.jacobians.core.binding import WithArguments

PLAIN = frozenset((bool, int, float, str, tuple))
"""Types of hyperparameters."""


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, its mode (training or evaluation) among them."""
    return {name: value for name, value in module.__dict__.items() if type(value) in PLAIN}


def as_called(options: Any, settings: dict[str, Any]) -> Any:
    """The options of a call with the settings as they were; a module shares parameters and buffers with its copy."""
    if isinstance(options, WithArguments):
        module = as_called(options.module, settings)
        return options if module is options.module else dataclasses.replace(options, module=module)
    if not isinstance(options, nn.Module):
        return options
    now = options.__dict__
    for name, value in settings.items():
        if now.get(name) is not value and now.get(name) != value and not name.startswith("_"):
            earlier = copy.copy(options)
            earlier.__dict__.update(settings)
            return earlier
    return options
