"""Derivatives in the input, for `benchmarks.beyond`, as one nests them by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import factorial

import torch
from torch import Tensor, nn
from torch.func import jacfwd, jacrev, jvp, vmap

from benchmarks.input_derivatives import unit_vectors


def coefficients(directions: Callable[[Tensor], Tensor], order: int) -> Callable[[nn.Module, Tensor], list[Tensor]]:
    """Taylor coefficients by `jvp` of `jvp`, along all directions at once."""

    def function(model: nn.Module, x: Tensor) -> list[Tensor]:
        def along(v: Tensor) -> tuple[Tensor, ...]:
            def start(t: Tensor) -> tuple[Tensor, ...]:
                return (model(x + t * v),)

            step = start
            for _ in range(order):
                step = derived(step)
            return step(torch.zeros(()))

        found = vmap(along, out_dims=0)(directions(x))
        return [found[0][0], *(c / factorial(k) for k, c in enumerate(found[1:], 1))]

    return function


def derived(function: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The same values and the derivative of the last one."""

    def both(t: Tensor) -> tuple[Tensor, ...]:
        values, slopes = jvp(function, (t,), (torch.ones(()),))
        return (*values, slopes[-1])

    return both


def twice(directions: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], list[Tensor]]:
    """Coefficients up to the second by `torch.autograd.grad` twice, for one direction and output after the other."""

    def function(model: nn.Module, x: Tensor) -> list[Tensor]:
        first, second = [], []
        for v in directions(x):
            t = x.new_zeros(len(x), *[1] * (x.dim() - 1), requires_grad=True)
            out = model(x + t * v)
            slopes = [torch.autograd.grad(y.sum(), t, create_graph=True)[0] for y in out.T]
            bends = [torch.autograd.grad(s.sum(), t, retain_graph=True)[0] for s in slopes]
            first.append(torch.stack([s.detach().flatten() for s in slopes], 1))
            second.append(torch.stack([b.flatten() for b in bends], 1) / 2)
        return [out.detach(), torch.stack(first), torch.stack(second)]

    return function


def hessian_diagonals(model: nn.Module, x: Tensor) -> Tensor:
    """The diagonals `[N, *out, *in]` of `jacfwd(jacrev(f))` of each sample."""
    return vmap(jacfwd(jacrev(lambda z: model(z[None])[0])))(x).diagonal(dim1=2, dim2=3)


def along_unit_vectors(model: nn.Module, x: Tensor) -> Tensor:
    """The same by `jvp` of `jvp` along each unit vector."""
    return 2 * coefficients(unit_vectors, 2)(model, x)[2].movedim(0, -1)
