"""Nested arguments and results, as they are called and described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bpk.jacobians.core.nested import mapped
from bpk.jacobians.core.nested import tensors_in as tensors_of


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced."""
    return mapped(value, lambda part: change(part) if isinstance(part, Tensor) else part)


def in_words(value: Any) -> str:
    """Its type, shapes and dtypes: `a tensor of shape [3, 4] (float32)`."""
    found = [f"{list(x.shape)} ({str(x.dtype).removeprefix('torch.')})" for x in tensors_of(value)]
    if isinstance(value, Tensor):
        return f"a tensor of shape {found[0]}"
    return f"{type(value).__name__} " + (f"with tensors of shape {', '.join(found)}" if found else "without tensors")
