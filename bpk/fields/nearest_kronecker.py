"""The Kronecker product that is nearest to a sum of two."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.products import add_up


def product_of(terms: list[list[Tensor]], input_first: bool) -> list[Tensor]:
    """The factors that stand for a sum of one or two products: `[G, A]`, or `[A, G]` where `input_first`."""
    factors = terms[0] if len(terms) == 1 else nearest_kronecker(terms)
    return factors[::-1] if input_first else factors


def nearest_kronecker(terms: list[list[Tensor]]) -> list[Tensor]:
    """The Kronecker product nearest to `G_1 x A_1 + G_2 x A_2` in the Frobenius norm (Van Loan and Pitsianis, 1993).

    Both of its factors are combinations of those given, and positive semi-definite if these are. The first is scaled so
    that `G_1` has the coefficient one.
    """
    left, right = [g for g, _ in terms], [a for _, a in terms]
    root_left, root_right = root_of_gram(left), root_of_gram(right)
    u, s, v = torch.linalg.svd(root_left @ root_right.T)
    x = torch.linalg.lstsq(root_left, u[:, :1]).solution[:, 0]
    y = torch.linalg.lstsq(root_right, v[:1].T).solution[:, 0] * s[0]
    scale = torch.where(x[0].abs() > 0, x[0], torch.ones_like(x[0]))
    first = add_up([c * g for c, g in zip(x / scale, left, strict=True)])
    return [first, add_up([c * a for c, a in zip(y * scale, right, strict=True)])]


def root_of_gram(matrices: list[Tensor]) -> Tensor:
    """`R` with `(R^T R)_ij = <M_i, M_j>`."""
    gram = torch.stack([torch.stack([(a * b).sum() for b in matrices]) for a in matrices])
    values, vectors = eigh(gram.double(), "a Gram matrix of Kronecker factors")
    return (values.clamp(min=0).sqrt()[:, None] * vectors.T).to(gram.dtype)
