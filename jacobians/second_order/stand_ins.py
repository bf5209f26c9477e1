"""Functions that stand for others while they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bpk.jacobians.second_order.weight_norm import weight_norm


class StandIns(TorchFunctionMode):
    """Inside, others stand for some functions.

    Args:
        functions: By the function that they stand for.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def written_out() -> StandIns:
    """Inside, functions are right where transforms differentiate them, which have no nodes to be `corrected`."""
    return StandIns({torch._weight_norm: weight_norm})
