"""Padding layers: linear maps that copy entries (or add constants) around the border."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Options
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import Copying


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

Sizes = dict[int, list[tuple[Any, tuple[int, ...]]]]
"""Examples for layers over so many axes: what is added, and to which shape."""

ADDED: Sizes = {
    1: [(2, (3, 2, 3)), ((0, 3), (2, 1, 4))],
    2: [(1, (2, 2, 2, 3)), ((2, 0, 1, 2), (2, 1, 3, 3))],
    3: [((1, 0, 0, 1, 1, 1), (2, 1, 2, 2, 2))],
}
CROPPED: Sizes = {
    1: [((-1, 2), (2, 2, 4))],
    2: [((1, -1, 2, 0), (2, 1, 2, 3))],
    3: [((1, 0, 0, 1, 2, -1), (2, 2, 2, 2, 1))],
}
ALL = {axes: ADDED[axes] + CROPPED[axes] for axes in ADDED}


def over_axes(modules: Iterable[type[nn.Module]], sizes: Sizes, *value: float, **options: Any) -> list[Copying]:
    """The rules of layers over one, two and three axes, which may take a `value` to pad with."""
    return [
        Copying(m, axes=axes, examples=[case(m, size, *value, shape=s) for size, s in sizes[axes]], **options)
        for axes, m in enumerate(modules, 1)
    ]


RULES = (
    Copying(
        Pad,
        linear=pad_without_value,
        functions=(F.pad,),
        examples=(
            case(Pad, (2, 1), shape=(2, 3)),
            case(Pad, (1, -1, 0, 2), value=1.5, shape=(2, 2, 3)),
            case(Pad, (1, 2, 0, 1, 1, 0), value=-1.0, shape=(2, 1, 2, 2)),
            case(Pad, (0, 1), value=float("-inf"), shape=(2, 3)),
            case(Pad, (2, 1), mode="reflect", shape=(2, 2, 3)),
            case(Pad, (1, 0, 2, 1), mode="replicate", shape=(2, 1, 2, 3)),
            case(Pad, (1, 1, 0, 2), mode="circular", shape=(2, 1, 3, 2)),
        ),
    ),
    *over_axes((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), ALL, 1.5, linear=pad_with_zeros),
    *over_axes((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), ALL),
    *over_axes((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), ADDED),
    *over_axes((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), ADDED),
    *over_axes((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), ADDED),
)
