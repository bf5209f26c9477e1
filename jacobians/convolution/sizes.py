"""Strides and paddings of a convolution: one number for each axis, and what makes sizes fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tuple_of(value: Any, length: int) -> tuple[int, ...]:
    """An option given once for all axes, or once per axis."""
    # a number may be one of numpy; tuples are asked for first, because `Sequence` answers in Python
    given = tuple(value) if isinstance(value, (tuple, Sequence)) else (value,)
    return given * length if len(given) == 1 else given


def leftover(
    long: Sequence[int],
    short: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    kernel: Sequence[int],
) -> list[int]:
    """The output padding that makes a transposed convolution lead from size `short` to size `long`."""
    axes = zip(long, short, stride, padding, dilation, kernel, strict=True)
    return [wanted - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for wanted, n, s, p, d, k in axes]
