"""Where torch is silently wrong in forward mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bpk.jacobians.core.engine import without_tangents


def require_forward_mode(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call whose result torch silently takes for a constant, or differentiates wrongly (seen in 2.13)."""
    if func in (torch.cholesky_inverse, Tensor.cholesky_inverse):
        raise NotImplementedError("torch differentiates cholesky_inverse wrongly in forward mode")
    if func in (torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_):
        wrong = "prod" in (kwargs.get("reduce"), *args[4:5])
    else:
        wrong = func is getattr(F, "linear_cross_entropy", None) and kwargs.get("options") is not None
    if wrong:
        raise NotImplementedError(f"torch takes this call of {func.__name__} for a constant in forward mode")


class ForwardMode(TorchFunctionMode):
    """Inside, forward mode is right, or raises: what is computed under `torch.no_grad()` is constant, as backwards.

    Torch takes tangents through it. Calls that it takes for constant, and does not say so, are refused.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        require_forward_mode(func, args, given)
        with nullcontext() if torch.is_grad_enabled() else without_tangents():
            return func(*args, **given)
