"""The Kronecker product that is nearest to a sum of two."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.products import add_up

ALMOST_NONE = 1e-6
"""Up to which share of the largest coefficient a term hardly takes part."""


def product_of(terms: list[list[Tensor]], input_first: bool) -> list[Tensor]:
    """The factors that stand for a sum of one or two products: `[G, A]`, or `[A, G]` where `input_first`."""
    factors = terms[0] if len(terms) == 1 else nearest_kronecker(terms)
    return factors[::-1] if input_first else factors


def nearest_kronecker(terms: list[list[Tensor]]) -> list[Tensor]:
    """The Kronecker product nearest to `G_1 x A_1 + G_2 x A_2` in the Frobenius norm (Van Loan and Pitsianis, 1993).

    Both of its factors are combinations of those given, `sum_i x_i G_i` and `sum_i y_i A_i`, and positive semi-definite
    if these are. With Gram matrices `K_G`, `K_A`, the best `y` for an `x` is `K_G x / (x^T K_G x)`, and the best `x`
    for a `y` a multiple of `K_A y`. So `x` is an eigenvector of `K_A K_G`, which takes no inverse: ranks may be any.
    The first factor is scaled so that `G_1` has the coefficient one (or the largest, where `G_1` hardly takes part).
    """
    left, right = [g for g, _ in terms], [a for _, a in terms]
    of_left, of_right = gram(left), gram(right)
    values, vectors = eigh(of_right, "a Gram matrix of Kronecker factors")
    root = vectors * values.clamp(min=0).sqrt()
    x = root @ eigh(root.T @ of_left @ root, "a Gram matrix of Kronecker factors")[1][:, -1]
    positive = (of_left >= 0).all() & (of_right >= 0).all()  # there is a best one without negative coefficients then
    x = torch.where(positive, x.abs(), x)
    largest = x.abs().amax()
    x = x / torch.where(x[0].abs() > ALMOST_NONE * largest, x[0], torch.where(largest > 0, largest, 1.0))
    y = of_left @ x
    y = y / (x @ y).clamp(min=torch.finfo(y.dtype).tiny)
    return [combined(x, left), combined(y, right)]


def gram(matrices: list[Tensor]) -> Tensor:
    """`<M_i, M_j>`, in double precision."""
    return torch.stack([torch.stack([(a * b).sum() for b in matrices]) for a in matrices]).double()


def combined(coefficients: Tensor, matrices: list[Tensor]) -> Tensor:
    """`sum_i c_i M_i`."""
    return add_up([c * m for c, m in zip(coefficients.to(matrices[0].dtype), matrices, strict=True)])
