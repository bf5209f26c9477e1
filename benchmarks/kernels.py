"""Do the cost models choose the faster way? `python -m benchmarks.kernels` measures both, over a grid of shapes.

Regret is the time of the way that was chosen, over that of the faster one. What is shown is its mean, the time that all
choices lose together, and the worst cases. The exit status is 1 where the mean or the time is above `LIMIT`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.core import cost, norms, squares

LIMIT = 1.15
WEIGHTS = ((10, 64), (32, 32), (96, 32), (64, 256), (256, 64), (192, 192), (500, 100), (768, 192), (128, 1152))
POSITIONS = (2, 4, 8, 16, 32, 65, 144)
COLUMNS = (1, 10, 100, 320)
SAMPLES = (4, 16, 64)
LARGEST = 5e8
"""How many multiplications a case takes at most: a grid is measured in minutes."""


@dataclass
class Choice:
    """What two ways cost and, in seconds, take."""

    name: str
    size: cost.Size
    expected: tuple[float, float]
    seconds: tuple[float, float]

    @property
    def chosen(self) -> float:
        """Seconds of the way that the model takes."""
        return self.seconds[self.expected.index(min(self.expected))]

    @property
    def regret(self) -> float:
        """How many times as long as the faster way."""
        return self.chosen / min(self.seconds)


def sizes() -> list[cost.Size]:
    """The grid, in an order that does not depend on the shape."""
    found = [
        cost.Size(v, n, 1, o, i, t, keep)
        for (o, i), t, v, n, keep in itertools.product(WEIGHTS, POSITIONS, COLUMNS, SAMPLES, (False, True))
        if v * n * o * i * t <= LARGEST and n * o * i * t * t <= LARGEST
    ]
    random.Random(0).shuffle(found)
    return found


def choices(size: cost.Size, positions_first: bool) -> Iterator[Choice]:
    """Measure squares and, of a single column, norms. Linear layers have positions first, convolutions features."""
    m, a = torch.randn(size.v, size.n, 1, size.o, size.t), torch.randn(size.n, 1, size.i, size.t)
    if positions_first:
        m, a = (x.mT.contiguous().mT for x in (m, a))
    given = (lambda samples: a[samples], [m], size.i, None, size.keep, fresh)
    ways = [partial(way, *given) for way in (squares.by_columns, squares.by_pairs)]
    yield Choice("squares", size, (cost.by_columns(size), cost.by_pairs(size)), alternate(ways))
    if size.v == 1 and not size.keep:
        ways = [partial(way, a, m[0]) for way in (norms.norm_by_rows, norms.norm_by_grams)]
        yield Choice("norms", size, (cost.by_rows(size), cost.by_grams(size)), alternate(ways))


def fresh(shape: Sequence[int], like: Tensor) -> Tensor:
    """New memory."""
    return torch.empty(shape, dtype=like.dtype)


def alternate(ways: Sequence[Callable[[], object]], rounds: int = 5) -> tuple[float, float]:
    """The least seconds of two ways that run one after the other."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for way, seconds in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
    return min(times[0][1:]), min(times[1][1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until the time is up, then print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for how long (default 120)")
    seconds = parser.parse_args(argv).seconds
    torch.set_num_threads(1)
    found: list[Choice] = []
    start = time.perf_counter()
    with torch.no_grad():
        for k, size in enumerate(sizes()):
            if time.perf_counter() - start > seconds:
                break
            found += choices(size, k % 2 == 0)
    worst = 1.0
    for name in ("squares", "norms"):
        some = [c for c in found if c.name == name]
        if not some:
            continue
        mean = sum(c.regret for c in some) / len(some)
        lost = sum(c.chosen for c in some) / sum(min(c.seconds) for c in some)
        habits = [sum(c.seconds[k] / min(c.seconds) for c in some) / len(some) for k in (0, 1)]
        print(f"{name}: {len(some)} cases, mean regret {mean:.3f}, time {lost:.3f}; always the first way", end=" ")
        print(f"{habits[0]:.2f}, always the second {habits[1]:.2f}. Worst:")
        for c in sorted(some, key=lambda c: -c.regret)[:5]:
            print(f"  {c.regret:.2f} x  {c.size}, {c.seconds[0] * 1e3:.2f} and {c.seconds[1] * 1e3:.2f} ms")
        worst = max(worst, mean, lost)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
