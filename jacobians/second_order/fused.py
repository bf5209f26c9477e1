"""Normalisations and norms as compositions, while derivatives of derivatives are taken by forward mode.

torch's fused kernels (seen in 2.13) return mean and `1 / std` beside the result. Its formulas take them for constants
when they are differentiated once more: `jvp` of `jvp` of `F.layer_norm` is silently wrong, and so are third derivatives
by reverse mode. `jvp` of `jvp` of a norm is right, but has no gradient: torch writes into what that needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.core.engine import BATCH_NORMS
from bpk.jacobians.core.numeric import safe_sqrt
from bpk.jacobians.second_order.algebra import ALGEBRA, NOT_THRICE, NOT_TWICE
from bpk.jacobians.second_order.stand_ins import StandIns, require_forward_mode
from bpk.jacobians.second_order.weight_norm import weight_norm


def standardized(x: Tensor, axes: list[int], eps: float, centred: bool = True) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over these axes; without `centred`, of mean squares."""
    moved = x - x.mean(axes, keepdim=True) if centred else x
    return moved * (moved.square().mean(axes, keepdim=True) + eps).rsqrt()


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`weight x + bias`."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def channels(p: Tensor | None, x: Tensor) -> Tensor | None:
    """A vector with one entry for each channel (axis 1), to be broadcast."""
    return None if p is None else p.reshape(-1, *[1] * (x.dim() - 2))


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`F.layer_norm`, `torch.layer_norm`."""
    return scaled(standardized(input, [*range(-len(normalized_shape), 0)], eps), weight, bias)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`F.rms_norm`, `torch.rms_norm`."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return scaled(standardized(input, [*range(-len(normalized_shape), 0)], eps, False), weight, None)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`F.group_norm`, `torch.group_norm`."""
    rows = input.reshape(input.shape[0], num_groups, -1)
    unit = standardized(rows, [2], eps).reshape(input.shape)
    return scaled(unit, channels(weight, input), channels(bias, input))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`; running statistics are read, and stay as they are."""
    axes = [axis for axis in range(input.dim()) if axis != 1]
    if training or running_mean is None or running_var is None:
        unit = standardized(input, axes, eps)
    else:
        mean, var = channels(running_mean, input), channels(running_var, input)
        assert mean is not None and var is not None
        unit = (input - mean) * (var + eps).rsqrt()
    return scaled(unit, channels(weight, input), channels(bias, input))


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.instance_norm`; running statistics are read, and stay as they are."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    unit = standardized(input, [*range(2, input.dim())], eps)
    return scaled(unit, channels(weight, input), channels(bias, input))


def euclidean(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The length of vectors along some axes (all by default), with the derivative 0 at 0."""
    axes = [*range(x.dim())] if dim is None else dim
    squares = x.real.square() + x.imag.square() if x.is_complex() else x.square()
    return safe_sqrt(squares.sum(axes, keepdim))


def norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Tensor:
    """`torch.norm`."""
    if p not in (None, "fro", 2) or out is not None or dtype is not None:
        return torch.norm(input, p, dim, keepdim, out, dtype)
    return euclidean(input, dim, keepdim)


def vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """`torch.linalg.vector_norm`."""
    if ord != 2 or any(x is not None for x in kwargs.values()):
        return torch.linalg.vector_norm(x, ord, dim, keepdim, **kwargs)
    return euclidean(x, dim, keepdim)


def linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """`torch.linalg.norm`."""
    of_vectors = ord == 2 and (isinstance(dim, int) or (dim is None and A.dim() == 1))
    if not (ord is None or of_vectors) or any(x is not None for x in kwargs.values()):
        return torch.linalg.norm(A, ord, dim, keepdim, **kwargs)
    return euclidean(A, dim, keepdim)


def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """`F.normalize`."""
    if p != 2 or out is not None:
        return F.normalize(input, p, dim, eps, out)
    return input / euclidean(input, dim, True).clamp_min(eps)


def index_select(input: Tensor, dim: Any, index: Tensor) -> Tensor:
    """`torch.index_select`, whose index may be a number: of several columns, torch would select nothing then."""
    return torch.index_select(input, dim, index.reshape(-1))


def parameters_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the order of arguments that `torch.batch_norm` and `torch.instance_norm` have."""

    def reordered(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        return function(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return reordered


COMPOSED: dict[Any, Callable[..., Any]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.batch_norm: batch_norm,
    torch.batch_norm: parameters_first(batch_norm),
    F.instance_norm: instance_norm,
    torch.instance_norm: parameters_first(instance_norm),
    torch.norm: norm,
    Tensor.norm: lambda self, p="fro", dim=None, keepdim=False, dtype=None: norm(self, p, dim, keepdim, dtype=dtype),
    torch.linalg.vector_norm: vector_norm,
    torch.linalg.norm: linalg_norm,
    F.normalize: normalize,
    torch._weight_norm: weight_norm,
    torch.index_select: index_select,
    Tensor.index_select: index_select,
    **ALGEBRA,
}
"""What stands for a fused function."""

OTHERS = (
    *(torch.native_layer_norm, torch.native_group_norm, torch.native_batch_norm, torch.batch_norm_update_stats),
    *BATCH_NORMS,
    *NOT_TWICE,
)
"""Functions for which nothing stands: fused ones whose further results have no derivative, and some of algebra."""


OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.default))


def as_function(func: Any) -> Any:
    """The function of torch that an operator of `torch.ops.aten` is, which exported programs call; or what it is."""
    if not isinstance(func, OPERATORS):
        return func
    space, name = str(func).split(".")[:2]
    if space != "aten":
        return func
    return getattr(torch.linalg if name.startswith("linalg_") else torch, name.removeprefix("linalg_"), func)


class Composed(StandIns):
    """Inside, fused normalisations and norms are compositions, and so are products and functions of matrices.

    Args:
        order: How many derivatives are taken by forward mode, one inside of the other; two are safe.
    """

    def __init__(self, order: int = 2) -> None:
        super().__init__(COMPOSED)
        self.order = order

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = as_function(func)
        if func in OTHERS:
            raise NotImplementedError(f"torch differentiates {func.__name__} wrongly, more than once by forward mode")
        if func in NOT_THRICE and self.order > 2:
            raise NotImplementedError(f"torch differentiates {func.__name__} wrongly, more than twice by forward mode")
        if func not in self.functions:
            require_forward_mode(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)
