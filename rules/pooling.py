"""Pooling layers: averages are linear maps, maxima select entries, power averages are differentiated generically."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.linear_map import LinearMap, Selection
from bpk.jacobians.rule import Rule


class PowerAverage(Autodiff):
    """Autodiff; where a window is zero, its root has a kink, and the derivative is zero, as in autograd."""

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return torch.where(call.output == 0, 0.0, super().jac_mat_prod(call, mat, wrt))


def window_maxima(pool: Callable[..., tuple[Tensor, Tensor]], call: Call) -> Tensor:
    """Where torch finds the maximum of each window (the first; NaN is the largest value)."""
    o = call.options
    return pool(call.inputs[0], o.kernel_size, o.stride, o.padding, o.dilation, ceil_mode=o.ceil_mode)[1]


def adaptive_maxima(pool: Callable[..., tuple[Tensor, Tensor]], call: Call) -> Tensor:
    """Where torch finds the maximum of each window of an adaptive pooling."""
    return pool(call.inputs[0], call.options.output_size)[1]


def max_pool(layer: type[nn.Module], axes: int, function: Any, pool: Any, *examples: Example) -> Selection:
    """The rule of a max pooling; `pool` returns indices too."""
    find = partial(window_maxima, pool)
    return Selection(layer, indices=find, axes=axes, functions=(function,), examples=examples)


def adaptive_max_pool(layer: type[nn.Module], axes: int, function: Any, pool: Any, *examples: Example) -> Selection:
    """The rule of an adaptive max pooling; `pool` returns indices too."""
    find = partial(adaptive_maxima, pool)
    return Selection(layer, indices=find, axes=axes, functions=(function,), examples=examples)


class FractionalMaxPooling(Selection):
    """Max pooling over windows whose places are drawn in the forward pass, and read off autograd's graph."""

    key = "slope"  # which travels with subsets of the batch

    def capture(self, call: Call) -> None:
        super().capture(call)
        self._flat_indices(call)


def drawn_maxima(call: Call) -> Tensor:
    """Where each output entry comes from, `[N, *out]`: its own column of the transposed Jacobian shows the place."""
    if call.pull is None:
        raise UnsupportedLayer(
            "Where a fractional max pooling found its maxima is not known.",
            "its windows are drawn at random, and were not recorded during the backward pass.",
            "compute the quantity during backward().",
        )
    out, spatial = call.output, call.options.kernel_size
    found = torch.zeros_like(out, dtype=torch.long).flatten(-len(spatial))
    for k in range(found.shape[-1]):
        unit = torch.zeros_like(out).flatten(-len(spatial))
        unit[..., k] = 1
        found[..., k] = call.pull(unit.view_as(out)).flatten(-len(spatial)).argmax(-1)
    return found.view_as(out)


RULES: tuple[Rule, ...] = (
    max_pool(
        nn.MaxPool1d,
        1,
        F.max_pool1d,
        F.max_pool1d_with_indices,
        case(nn.MaxPool1d, 2, shape=(3, 2, 5)),
        case(nn.MaxPool1d, 3, 2, padding=1, ceil_mode=True, shape=(2, 2, 6)),
        case(nn.MaxPool1d, 2, 1, dilation=2, shape=(2, 1, 5)),
        case(nn.MaxPool1d, 2, return_indices=True, shape=(2, 2, 4)),
        case(nn.MaxPool1d, 2, shape=(3, 4)),
    ),
    max_pool(
        nn.MaxPool2d,
        2,
        F.max_pool2d,
        F.max_pool2d_with_indices,
        case(nn.MaxPool2d, 2, shape=(2, 2, 4, 4)),
        case(nn.MaxPool2d, 3, 2, ceil_mode=True, shape=(2, 2, 6, 4)),
        case(nn.MaxPool2d, (2, 3), (1, 2), padding=(1, 0), shape=(2, 1, 3, 5)),
        case(nn.MaxPool2d, 2, 1, dilation=(1, 2), shape=(2, 1, 3, 4)),
        case(nn.MaxPool2d, 2, return_indices=True, shape=(2, 1, 2, 4)),
        case(nn.MaxPool2d, 2, shape=(2, 4, 4)),
    ),
    max_pool(
        nn.MaxPool3d,
        3,
        F.max_pool3d,
        F.max_pool3d_with_indices,
        case(nn.MaxPool3d, 2, shape=(2, 2, 2, 2, 3)),
        case(nn.MaxPool3d, (1, 2, 2), (1, 1, 2), padding=(0, 1, 0), ceil_mode=True, shape=(2, 1, 2, 2, 3)),
        case(nn.MaxPool3d, 2, 1, dilation=(1, 2, 1), return_indices=True, shape=(2, 1, 2, 3, 2)),
    ),
    adaptive_max_pool(
        nn.AdaptiveMaxPool1d,
        1,
        F.adaptive_max_pool1d,
        F.adaptive_max_pool1d_with_indices,
        case(nn.AdaptiveMaxPool1d, 3, shape=(2, 2, 5)),
        case(nn.AdaptiveMaxPool1d, 2, return_indices=True, shape=(2, 2, 3)),
    ),
    adaptive_max_pool(
        nn.AdaptiveMaxPool2d,
        2,
        F.adaptive_max_pool2d,
        F.adaptive_max_pool2d_with_indices,
        case(nn.AdaptiveMaxPool2d, 2, shape=(2, 2, 3, 4)),
        case(nn.AdaptiveMaxPool2d, (3, None), shape=(2, 1, 5, 2)),
        case(nn.AdaptiveMaxPool2d, (1, 2), return_indices=True, shape=(2, 1, 3, 3)),
    ),
    adaptive_max_pool(
        nn.AdaptiveMaxPool3d,
        3,
        F.adaptive_max_pool3d,
        F.adaptive_max_pool3d_with_indices,
        case(nn.AdaptiveMaxPool3d, 2, shape=(2, 1, 3, 2, 3)),
        case(nn.AdaptiveMaxPool3d, (None, 1, 2), return_indices=True, shape=(2, 2, 2, 2, 3)),
    ),
    LinearMap(
        nn.AvgPool1d,
        axes=1,
        functions=(F.avg_pool1d,),
        examples=(
            case(nn.AvgPool1d, 2, shape=(3, 2, 5)),
            case(nn.AvgPool1d, 3, 2, padding=1, ceil_mode=True, shape=(2, 2, 6)),
            case(nn.AvgPool1d, 3, 2, padding=1, count_include_pad=False, shape=(2, 1, 5)),
            case(nn.AvgPool1d, 2, shape=(3, 4)),
        ),
    ),
    LinearMap(
        nn.AvgPool2d,
        axes=2,
        functions=(F.avg_pool2d,),
        examples=(
            case(nn.AvgPool2d, 2, shape=(2, 2, 4, 4)),
            case(nn.AvgPool2d, 3, 2, ceil_mode=True, shape=(2, 2, 6, 4)),
            case(nn.AvgPool2d, (2, 3), (1, 2), padding=(1, 0), count_include_pad=False, shape=(2, 1, 3, 5)),
            case(nn.AvgPool2d, 2, 1, padding=1, divisor_override=3, shape=(2, 1, 3, 2)),
            case(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, count_include_pad=False, shape=(2, 1, 4, 4)),
        ),
    ),
    LinearMap(
        nn.AvgPool3d,
        axes=3,
        functions=(F.avg_pool3d,),
        examples=(
            case(nn.AvgPool3d, 2, shape=(2, 2, 2, 2, 3)),
            case(nn.AvgPool3d, (1, 2, 2), (1, 1, 2), padding=(0, 1, 0), ceil_mode=True, shape=(2, 1, 2, 2, 3)),
            case(nn.AvgPool3d, 2, 1, padding=1, count_include_pad=False, shape=(2, 1, 2, 2, 2)),
            case(nn.AvgPool3d, 2, divisor_override=5, shape=(2, 1, 2, 2, 2)),
        ),
    ),
    LinearMap(
        nn.AdaptiveAvgPool1d,
        axes=1,
        functions=(F.adaptive_avg_pool1d,),
        examples=(case(nn.AdaptiveAvgPool1d, 3, shape=(2, 2, 5)), case(nn.AdaptiveAvgPool1d, 1, shape=(2, 2, 3))),
    ),
    LinearMap(
        nn.AdaptiveAvgPool2d,
        axes=2,
        functions=(F.adaptive_avg_pool2d,),
        examples=(
            case(nn.AdaptiveAvgPool2d, 1, shape=(2, 3, 2, 3)),
            case(nn.AdaptiveAvgPool2d, (2, 3), shape=(2, 2, 3, 4)),
            case(nn.AdaptiveAvgPool2d, (None, 4), shape=(2, 1, 2, 3)),
        ),
    ),
    LinearMap(
        nn.AdaptiveAvgPool3d,
        axes=3,
        functions=(F.adaptive_avg_pool3d,),
        examples=(
            case(nn.AdaptiveAvgPool3d, 2, shape=(2, 1, 3, 2, 3)),
            case(nn.AdaptiveAvgPool3d, (None, 1, 2), shape=(2, 2, 2, 2, 3)),
        ),
    ),
    PowerAverage(
        nn.LPPool1d,
        functions=(F.lp_pool1d,),
        examples=(case(nn.LPPool1d, 2, 2, shape=(2, 2, 5)), case(nn.LPPool1d, 2, 3, 2, True, shape=(2, 1, 6))),
    ),
    PowerAverage(
        nn.LPPool2d,
        functions=(F.lp_pool2d,),
        examples=(case(nn.LPPool2d, 2, 2, shape=(2, 1, 4, 2)), case(nn.LPPool2d, 2, (2, 1), 1, shape=(2, 1, 3, 2))),
    ),
    PowerAverage(nn.LPPool3d, functions=(F.lp_pool3d,), examples=(case(nn.LPPool3d, 2, 2, shape=(2, 1, 2, 2, 4)),)),
    FractionalMaxPooling(
        nn.FractionalMaxPool2d,
        indices=drawn_maxima,
        axes=2,
        functions=(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
        examples=(
            case(nn.FractionalMaxPool2d, 2, output_size=(2, 3), shape=(3, 2, 4, 5)),
            case(nn.FractionalMaxPool2d, (3, 2), output_ratio=0.6, shape=(2, 1, 5, 4)),
            case(nn.FractionalMaxPool2d, 2, output_size=2, return_indices=True, shape=(2, 1, 4, 3)),
        ),
    ),
    FractionalMaxPooling(
        nn.FractionalMaxPool3d,
        indices=drawn_maxima,
        axes=3,
        functions=(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
        examples=(
            case(nn.FractionalMaxPool3d, 2, output_size=(1, 2, 2), shape=(2, 1, 3, 4, 4)),
            case(nn.FractionalMaxPool3d, (1, 2, 2), output_ratio=0.7, shape=(2, 2, 2, 4, 4)),
        ),
    ),
)
