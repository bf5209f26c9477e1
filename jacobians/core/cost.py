"""What the ways to squares and norms cost, in nanoseconds of a core: calls, multiplications, numbers touched.

Only ratios matter: the cheaper way is taken. The constants were fitted to measurements; `python -m benchmarks.kernels`
tells how much time these choices lose against the better way.
"""

from __future__ import annotations

from typing import NamedTuple

from bpk.jacobians.core.numeric import CACHE, go_one_by_one, has_wide_vectors

FEW = 1 << 14
"""Fewer numbers than these in an output are not worth the question what a gradient costs."""


class Size(NamedTuple):
    """`V` columns, `N` samples with `G` groups, weights `[O, I]`, `T` positions; squares for every sample or summed."""

    v: int
    n: int
    g: int
    o: int
    i: int
    t: int
    keep: bool = False

    @property
    def pairs(self) -> int:
        """How many pairs of positions there are."""
        return self.t * (self.t + 1) // 2


def by_columns(s: Size) -> float:
    """Squares from products with every column: one product for each, written, squared and added."""
    b = s.n * s.g
    products = s.v * b * s.o * s.i
    buffers = 1 + s.v * b * s.o * max(s.i, s.t) // CACHE
    moved = s.v * b * s.o * s.t if s.v > 1 else 0
    return 3e4 * buffers + products * (0.23 + 0.015 * s.t) + 0.63 * moved + 0.27 * s.keep * b * s.o * s.i


def by_pairs(s: Size) -> float:
    """Squares from pairs of positions: pairs of inputs, Gram matrices of columns, and one product for all of these."""
    b = s.n * s.g
    buffers = 1 + b * s.t * (s.t + 1) * (s.o + s.i) // (16 * CACHE)
    grams = b * s.o * s.t * (2.2 * s.v + 1.4 * s.t) if s.v > 1 else 0
    formed = 0.96 * b * s.pairs * (s.o + s.i)
    return (7.5e4 + 3e3 * s.t) * buffers + grams + formed + b * s.o * s.i * (0.021 * s.pairs + 0.4 * s.keep)


def by_rows(s: Size) -> float:
    """Norms from individual gradients."""
    return 1e4 + s.n * s.g * product(s.o, s.t, s.i)


def by_grams(s: Size) -> float:
    """Norms from the Gram matrices of positions."""
    return 2e4 + s.n * s.g * (product(s.t, s.o, s.t) + product(s.t, s.i, s.t))


def gradient(s: Size) -> float:
    """The sum of individual gradients as one product."""
    return multiplication(large=True) * s.n * s.g * s.o * s.i * s.t


def adding_up(s: Size) -> float:
    """The same from individual gradients that are there, and telling autograd of it."""
    return 2e5 + 0.3 * s.n * s.g * s.o * s.i


def product(m: int, k: int, n: int) -> float:
    """One matrix product `[m, k] [k, n]` among several, and what is done with its entries."""
    onednn = go_one_by_one(m * k * n)
    return 0.3 * m * n + (1.5e4 if onednn else 250) + multiplication(onednn) * m * k * n


def multiplication(large: bool) -> float:
    """One multiplication of a matrix product; in large ones it takes less where vectors are wide."""
    return 0.026 if not has_wide_vectors() else 0.012 if large else 0.023
