"""Are the ways chosen for convolutions the fastest: to the input factor (KFAC), and to individual gradients?

    python -m benchmarks.convolution_choices

For each shape: the time of every alternative and of what is chosen, and its regret: how much longer it takes than the
fastest. The exit status is 1 where a regret is larger than `ALLOWED`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from bpk.jacobians.convolution import moments
from bpk.jacobians.convolution.by_library import ByLibrary
from bpk.jacobians.core.call import Call
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY

ALLOWED = 0.15

Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [
    (8, 3, 64, 7, 2), (8, 64, 16, 3, 1), (8, 64, 16, 3, 2), (8, 128, 8, 3, 1), (8, 128, 8, 3, 2), (8, 256, 4, 3, 1),
    (8, 256, 4, 3, 2), (8, 512, 2, 3, 1), (64, 512, 2, 3, 1), (8, 64, 32, 3, 1), (8, 128, 16, 3, 1), (8, 256, 8, 3, 1),
    (16, 96, 32, 3, 2), (16, 192, 16, 3, 2), (16, 192, 8, 3, 1), (16, 192, 6, 1, 1), (64, 3, 32, 5, 1),
    (64, 64, 14, 3, 1), (64, 96, 6, 3, 1), (2, 32, 12, 5, 1), (4, 32, 8, 2, 2), (2, 16, 24, 3, 1), (4, 24, 16, 4, 1),
]  # fmt: skip
"""Samples, channels, height and width, kernel, stride: those of ResNet-18, WRN-16-4, All-CNN-C, 3C3D, and others."""

Ways = dict[str, Callable[[], AbstractContextManager[Any]]]

FACTORS: Ways = {
    "chosen": nullcontext,
    "shared rows": lambda: patch.object(moments, "ASSEMBLING", -1 << 40),
    "one product": lambda: patch.object(moments, "ASSEMBLING", 1 << 40),
}
"""Ways to the input factor."""

ROWS: Ways = {
    "chosen": nullcontext,
    "patches": lambda: patch.object(ByLibrary, "is_faster", lambda *_: False),
    "library": lambda: patch.object(ByLibrary, "is_faster", lambda *_: True),
}
"""Ways to squares of individual gradients."""


def call_of(shape: Shape, outputs: int = 8) -> tuple[Rule, Call]:
    """A convolution on random data."""
    n, channels, size, kernel, stride = shape
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2)
    rule = REGISTRY.find(layer)
    assert rule is not None
    return rule, Call.of(layer, torch.randn(n, channels, size, size), params=("weight",), rule=rule)


def seconds(compute: Callable[[], object], ways: Ways, rounds: int) -> dict[str, float]:
    """Processor time of what is chosen and of the alternatives, interleaved: medians."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways] * rounds:
        with ways[name]():
            compute()  # so that none finds memory as another has left it
            start = time.process_time()
            compute()
            found[name].append(time.process_time() - start)
    return {name: median(times) for name, times in found.items()}


def input_factor(shape: Shape) -> Callable[[], object]:
    """The input factor of KFAC."""
    rule, call = call_of(shape)
    return lambda: rule.kron_input(call, "weight")


def squares(shape: Shape) -> Callable[[], object]:
    """The sum of squared individual gradients, with as many output channels as inputs (32 at least)."""
    rule, call = call_of(shape, max(32, shape[1]))
    column = torch.randn(1, *call.output.shape)
    return lambda: rule.squared_sum(call, column, "weight")


@torch.no_grad()
def main(rounds: int = 15, shapes: list[Shape] = SHAPES) -> int:
    torch.set_num_threads(1)
    largest = 0.0
    for title, ways, prepared in (("input factor", FACTORS, input_factor), ("squares", ROWS, squares)):
        print(title)
        for shape in shapes:
            times = seconds(prepared(shape), ways, rounds)
            regret = times["chosen"] / min(times.values()) - 1
            largest = max(largest, regret)
            listed = ", ".join(f"{name} {1e3 * t:.2f}" for name, t in times.items())
            print(f"{shape!s:24} {listed} ms; regret {regret:.0%}{' !' * (regret > ALLOWED)}", flush=True)
    print(f"largest regret: {largest:.0%}")
    return int(largest > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
