"""Padding layers: linear maps that copy entries (or add constants) around the border."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Options
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import LinearMap


def pad_with_zeros(options: Options, x: Tensor) -> Tensor:
    """Padding with a constant, without the constant."""
    return F.pad(x, options.padding)


def pad(x: Tensor, /, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad the last axes, two numbers each from the last axis on (negative numbers crop), as `F.pad` does."""
    return F.pad(x, pad, mode, value)


def pad_without_value(options: Options, x: Tensor) -> Tensor:
    """`pad`, with zeros where it pads with a constant."""
    return F.pad(x, options.pad, options.mode)


Pad = layer("Pad", pad, home="pad")

RULES = (
    LinearMap(
        Pad,
        linear=pad_without_value,
        functions=(F.pad,),
        examples=(
            case(Pad, (2, 1), shape=(2, 3)),
            case(Pad, (1, -1, 0, 2), value=1.5, shape=(2, 2, 3)),
            case(Pad, (1, 2, 0, 1, 1, 0), value=-1.0, shape=(2, 1, 2, 2)),
            case(Pad, (2, 1), mode="reflect", shape=(2, 2, 3)),
            case(Pad, (1, 0, 2, 1), mode="replicate", shape=(2, 1, 2, 3)),
            case(Pad, (1, 1, 0, 2), mode="circular", shape=(2, 1, 3, 2)),
        ),
    ),
    LinearMap(
        nn.ConstantPad1d,
        linear=pad_with_zeros,
        axes=1,
        examples=(
            case(nn.ConstantPad1d, 2, 1.5, shape=(3, 2, 3)),
            case(nn.ConstantPad1d, (3, -1), -2.0, shape=(2, 2, 4)),
            case(nn.ConstantPad1d, (0, 1), float("-inf"), shape=(2, 3)),
        ),
    ),
    LinearMap(
        nn.ConstantPad2d,
        linear=pad_with_zeros,
        axes=2,
        examples=(
            case(nn.ConstantPad2d, 1, 0.5, shape=(2, 2, 2, 3)),
            case(nn.ConstantPad2d, (1, 0, -1, 2), 3.0, shape=(2, 1, 3, 2)),
        ),
    ),
    LinearMap(
        nn.ConstantPad3d,
        linear=pad_with_zeros,
        axes=3,
        examples=(
            case(nn.ConstantPad3d, 1, 2.0, shape=(2, 1, 2, 1, 2)),
            case(nn.ConstantPad3d, (1, 0, 0, 2, -1, 1), 1.0, shape=(2, 2, 2, 2, 2)),
        ),
    ),
    LinearMap(
        nn.ZeroPad1d,
        axes=1,
        examples=(case(nn.ZeroPad1d, 2, shape=(3, 2, 3)), case(nn.ZeroPad1d, (-1, 2), shape=(2, 2, 4))),
    ),
    LinearMap(
        nn.ZeroPad2d,
        axes=2,
        examples=(case(nn.ZeroPad2d, 1, shape=(2, 2, 2, 3)), case(nn.ZeroPad2d, (1, -1, 2, 0), shape=(2, 1, 2, 3))),
    ),
    LinearMap(nn.ZeroPad3d, axes=3, examples=(case(nn.ZeroPad3d, (1, 0, 0, 1, 2, -1), shape=(2, 2, 2, 2, 1)),)),
    LinearMap(
        nn.ReflectionPad1d,
        axes=1,
        examples=(case(nn.ReflectionPad1d, 2, shape=(3, 2, 3)), case(nn.ReflectionPad1d, (0, 3), shape=(2, 1, 4))),
    ),
    LinearMap(
        nn.ReflectionPad2d,
        axes=2,
        examples=(
            case(nn.ReflectionPad2d, 1, shape=(2, 2, 2, 3)),
            case(nn.ReflectionPad2d, (2, 0, 1, 2), shape=(2, 1, 3, 3)),
        ),
    ),
    LinearMap(
        nn.ReflectionPad3d, axes=3, examples=(case(nn.ReflectionPad3d, (1, 0, 0, 1, 1, 1), shape=(2, 1, 2, 2, 2)),)
    ),
    LinearMap(
        nn.ReplicationPad1d,
        axes=1,
        examples=(case(nn.ReplicationPad1d, 2, shape=(3, 2, 2)), case(nn.ReplicationPad1d, (0, 3), shape=(2, 1, 2))),
    ),
    LinearMap(
        nn.ReplicationPad2d,
        axes=2,
        examples=(
            case(nn.ReplicationPad2d, 1, shape=(2, 2, 2, 3)),
            case(nn.ReplicationPad2d, (3, 0, 1, 2), shape=(2, 1, 2, 2)),
        ),
    ),
    LinearMap(
        nn.ReplicationPad3d, axes=3, examples=(case(nn.ReplicationPad3d, (1, 0, 0, 2, 1, 1), shape=(2, 1, 2, 2, 2)),)
    ),
    LinearMap(
        nn.CircularPad1d,
        axes=1,
        examples=(case(nn.CircularPad1d, 2, shape=(3, 2, 3)), case(nn.CircularPad1d, (0, 3), shape=(2, 1, 3))),
    ),
    LinearMap(
        nn.CircularPad2d,
        axes=2,
        examples=(
            case(nn.CircularPad2d, 1, shape=(2, 2, 2, 3)),
            case(nn.CircularPad2d, (2, 0, 1, 2), shape=(2, 1, 3, 2)),
        ),
    ),
    LinearMap(nn.CircularPad3d, axes=3, examples=(case(nn.CircularPad3d, (1, 0, 0, 2, 1, 1), shape=(2, 1, 2, 2, 2)),)),
)
