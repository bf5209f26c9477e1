"""Functions that stand for others while they are called, as for those of torch that have no right second derivative.

Where torch is silently wrong in forward mode, and nothing stands for a function, its calls are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from bpk.jacobians.core.engine import without_tangents
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


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention` by plain products, also where the model has chosen a fused kernel itself."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, which adds a bias that comes without a weight afterwards (see `corrected.py`)."""
    if weight is not None or bias is None:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return F.layer_norm(input, normalized_shape, None, None, eps) + bias


TWICE: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: weight_norm,
    F.scaled_dot_product_attention: attention,
    F.layer_norm: layer_norm,
}
"""What has all second derivatives, by the function that it stands for."""


# ---- forward mode ---------------------------------------------------------------------------------
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
