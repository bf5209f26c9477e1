"""Individual gradients and the GGN diagonal of a classifier with cross-entropy, by plain autograd.

For probabilities `p` the Hessian of the loss of one sample is `S S^T` with `S = diag(sqrt(p)) - p sqrt(p)^T`, so that
the GGN diagonal is the sum of the squares of `J_n^T s_c / sqrt(N)` over samples `n` and columns `s_c` of `S`: one
backward pass each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def of_samples(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, params: dict[str, nn.Parameter]
) -> Iterator[tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]]:
    """Of each sample: the gradient of its share of the mean loss, and `J_n^T s_c / sqrt(N)` for each column."""
    for n in range(len(x)):
        logits = model(x[n : n + 1])
        loss = F.cross_entropy(logits, y[n : n + 1]) / len(x)
        yield gradients(loss, None, params), columns(logits[0], len(x), params)


def columns(logits: Tensor, samples: int, params: dict[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """`J_n^T s_c / sqrt(N)` for each column."""
    p = logits.detach().softmax(0)
    root = (p.sqrt().diag() - torch.outer(p, p.sqrt())) / samples**0.5
    for column in root.T:
        yield gradients(logits, column, params)


def gradients(of: Tensor, vector: Tensor | None, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The vector-Jacobian products of those parameters that take part."""
    found: Sequence[Tensor | None] = torch.autograd.grad(
        of, list(params.values()), vector, retain_graph=True, allow_unused=True
    )
    return {name: gradient for name, gradient in zip(params, found, strict=True) if gradient is not None}


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, divided by the largest entry; infinite where something is not a number."""
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if difference == 0:
        return 0.0
    return difference / largest if largest > 0 and not math.isnan(difference) else math.inf
