"""Is the way that is chosen for the input factor of a convolution (KFAC) the fastest one?

    python -m benchmarks.convolution_choices

For each shape: the time of every alternative and of what is chosen, and its regret: how much longer it takes than the
fastest. The exit status is 1 where a regret is larger than `ALLOWED`.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from statistics import median
from unittest.mock import patch

import torch
from torch import nn

from bpk.jacobians.convolution import moments
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

WAYS = {
    "chosen": nullcontext,
    "shared rows": lambda: patch.object(moments, "ASSEMBLING", -1 << 40),
    "one product": lambda: patch.object(moments, "ASSEMBLING", 1 << 40),
}


def call_of(shape: Shape) -> tuple[Rule, Call]:
    """A convolution on random data."""
    n, channels, size, kernel, stride = shape
    layer = nn.Conv2d(channels, 8, kernel, stride, padding=kernel // 2)
    rule = REGISTRY.find(layer)
    assert rule is not None
    return rule, Call.of(layer, torch.randn(n, channels, size, size), params=("weight",), rule=rule)


def seconds(shape: Shape, rounds: int) -> dict[str, float]:
    """Processor time of what is chosen and of the alternatives, interleaved: medians."""
    rule, call = call_of(shape)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for name in [*WAYS] * rounds:
        with WAYS[name]():
            rule.kron_input(call, "weight")  # so that none finds memory as another has left it
            start = time.process_time()
            rule.kron_input(call, "weight")
            found[name].append(time.process_time() - start)
    return {name: median(times) for name, times in found.items()}


@torch.no_grad()
def main(rounds: int = 15, shapes: list[Shape] = SHAPES) -> int:
    torch.set_num_threads(1)
    largest = 0.0
    for shape in shapes:
        times = seconds(shape, rounds)
        regret = times["chosen"] / min(times.values()) - 1
        largest = max(largest, regret)
        listed = ", ".join(f"{name} {1e3 * t:.2f}" for name, t in times.items())
        print(f"{shape!s:24} {listed} ms; regret {regret:.0%}{' !' * (regret > ALLOWED)}", flush=True)
    print(f"largest regret: {largest:.0%}")
    return int(largest > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
