"""Truncated power series: values on a curve `x(t) = x + c_1 t + ... + c_K t^K`, and what functions make of them.

A series has a value `[N, *x]` and coefficients `c_k` `[V, N, *x]`, one for each of `V` curves; `None` stands for zero.
The algebra is exact up to the order `K`. The last coefficient of a function is linear in the last coefficient of its
argument, `f'(x) c_K + (what c_1 ... c_{K-1} make)`, so that a weighted sum of it over all curves can be carried as one
column: a *collapsed* series has `[1, N, *x]` there (Dangel et al. (2025), Collapsing Taylor mode automatic
differentiation; for `K = 2` Li et al. (2023), the forward Laplacian).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import is_differentiated, like_columns, sum_of_squares

Term = Tensor | None
"""A coefficient `[V, N, *x]`; `None` stands for zero."""


@dataclass(frozen=True)
class Collapse:
    """Sums over curves, `sum_v w_v c_v`, with weights `[V]` (all 1 by default)."""

    weights: Tensor | None = None

    def of(self, columns: Tensor) -> Tensor:
        """`[V, N, *x] -> [1, N, *x]`."""
        if self.weights is not None:
            columns = columns * like_columns(self.weights.to(columns.dtype), columns)
        return columns.sum(0, keepdim=True)

    def of_product(self, a: Tensor, b: Tensor) -> Tensor:
        """The same of a product of entries; squares are not all written at once."""
        if a is not b or is_differentiated():
            return self.of(a * b)
        weights = None if self.weights is None else self.weights[:, None].expand(-1, a.shape[1])
        return sum_of_squares(a, weights).to(a.dtype)[None]


@dataclass(frozen=True)
class Series:
    """A value `[N, *x]` and the coefficients `c_1 ... c_K` of the curves through it.

    >>> x = Series(torch.tensor([[2.0]]), (torch.ones(1, 1, 1), None))
    >>> [c.item() for c in x.times(x).terms]
    [4.0, 1.0]
    """

    value: Tensor
    terms: tuple[Term, ...]
    collapse: Collapse | None = None
    nested: bool = False
    """Whether coefficients come from nested forward mode, for want of a formula."""
    shares: bool = False
    """Whether value and coefficients are to pass a weight in one product, which then has the quantities of a layer."""

    @property
    def order(self) -> int:
        """`K`."""
        return len(self.terms)

    @property
    def counts(self) -> list[int]:
        """How many columns each coefficient has: one for each curve, or one in all where it is collapsed."""
        curves = next((len(c) for c in self.terms if c is not None), 0)
        collapsed = self.collapse is not None and self.order > 1
        return [curves] * (self.order - 1) + [1 if collapsed else curves]

    def moved(self, value: Tensor, terms: Sequence[Term]) -> Series:
        """Another series on the same curves."""
        return Series(value, tuple(terms), self.collapse, self.nested, self.shares)

    def constant(self, value: Tensor) -> Series:
        """A value that is the same on all of these curves."""
        return self.moved(value, [None] * self.order)

    def linear(self, value: Tensor, function: Callable[..., Tensor], *arguments: Any) -> Series:
        """`A x + const`, given its value and `A` as a function of columns (and of further arguments)."""
        return self.moved(value, [None if c is None else function(c, *arguments) for c in self.terms])

    def plus(self, other: Series) -> Series:
        """`x + y`."""
        terms = [add(a, b) for a, b in zip(self.terms, other.terms, strict=True)]
        return self.moved(self.value + other.value, terms)

    def times(self, other: Series) -> Series:
        """`x y`, entry by entry (with broadcasting)."""
        return self.product(other, self.value * other.value, torch.mul)

    def product(self, other: Series, value: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Series:
        """`B(x, y)` for a bilinear `multiply` of columns, by Leibniz: `c_k = sum_j B(a_j, b_{k-j})`."""
        a, b = (self.value[None], *self.terms), (other.value[None], *other.terms)
        return self.moved(value, [self.convolved(a, b, k, multiply) for k in range(1, self.order + 1)])

    def convolved(
        self, a: Sequence[Term], b: Sequence[Term], k: int, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> Term:
        """`sum_j B(a_j, b_{k-j})`; `None` stands for zero, at the place of a value, too."""
        total: Term = None
        for j in range(k + 1):
            left, right = a[j], b[k - j]
            if left is not None and right is not None:
                mixed = 0 < j < k  # neither factor has been collapsed
                total = add(total, self.summed(k, left, right, multiply) if mixed else multiply(left, right))
        return total

    def summed(self, k: int, a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The part of coefficient `k` that a product makes."""
        if self.collapse is None or k < self.order:
            return multiply(a, b)
        return self.collapse.of_product(a, b) if multiply is torch.mul else self.collapse.of(multiply(a, b))

    def compose(self, value: Tensor, derivatives: Sequence[Tensor]) -> Series:
        """`f(x)`, entry by entry, given `f(x)` and `f'(x), f''(x), ...`, by Faà di Bruno.

        `c_k = sum_m f^(m)(x) / m! [t^k] (c_1 t + c_2 t^2 + ...)^m`; derivatives that are left out are zero.
        """
        own: tuple[Term, ...] = (None, *self.terms)
        power = own
        total = [None if c is None else derivatives[0] * c for c in self.terms]
        for m, derivative in enumerate(derivatives[1 : self.order], start=2):
            power = (None, *(self.convolved(own, power, k, torch.mul) for k in range(1, self.order + 1)))
            factor = derivative / factorial(m)
            total = [add(sum_, None if p is None else factor * p) for sum_, p in zip(total, power[1:], strict=True)]
        return self.moved(value, total)


def exponential(x: Series, value: Tensor) -> Series:
    """A multiple of `exp x`, entry by entry, with this value."""
    return x.compose(value, [value] * x.order)


def softmax(x: Series, p: Tensor, dim: int) -> Series:
    """`softmax x` along axis `dim` of columns `[V, N, *x]`, with the value `p`.

    `u = p exp(x(t) - x)` has the same quotients as `exp x`, and the sum 1 at `t = 0`: `softmax x = u / sum u`.
    """
    u = exponential(x, p)
    total = u.linear(torch.ones((), dtype=p.dtype, device=p.device), lambda c: c.sum(dim, keepdim=True))
    slopes = [total.value * (-1) ** m * factorial(m) for m in range(1, x.order + 1)]
    return u.product(total.compose(total.value, slopes), p, torch.mul)


def add(a: Term, b: Term) -> Term:
    """A sum in which `None` stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
