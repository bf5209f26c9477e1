"""Hessian diagonals by plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from tests.references.kronecker import jacobian


def of_loss(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The diagonal `[*p]` of the Hessian in each parameter of a model."""
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, create_graph=True)
    square = [jacobian(g, [p])[0].reshape(p.numel(), p.numel()) for g, p in zip(grads, params, strict=True)]
    return [hessian.diagonal().reshape(p.shape) for hessian, p in zip(square, params, strict=True)]


def of_samples(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> list[Tensor]:
    """The diagonal `[N, *p]` of every sample's Hessian, for a loss that is a mean."""
    rows = [slice(n, n + 1) for n in range(len(x))]
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels are differentiated once only
        each = [of_loss(model, loss_fn(model(x[row]), y[row]) / len(x)) for row in rows]
    return [torch.stack(of_param) for of_param in zip(*each, strict=True)]
