"""Operators of `torch.ops.aten`, which exported programs call, by the names that functions of torch have."""

from __future__ import annotations

from typing import Any

import torch

KINDS = (type(torch.ops.aten.add), type(torch.ops.aten.add.default))


def as_function(func: Any) -> Any:
    """The function of torch that an operator is, with the same arguments; anything else, itself."""
    if not isinstance(func, KINDS):
        return func
    space, name = str(func).split(".")[:2]
    if space != "aten":
        return func
    return getattr(torch.linalg if name.startswith("linalg_") else torch, name.removeprefix("linalg_"), func)
