"""Traces of the Hessian and the GGN by random vectors: `E[vᵀ H v] = tr H` for entries of v that are ±1.

`HMP` and `GGNMP` leave on each parameter a function that multiplies with its diagonal block, any number of vectors
in one go. A matrix's trace is the sum of its diagonal blocks' traces, so the blocks are all that is needed. The
estimate's variance is twice the sum of the squared off-diagonal entries, whatever the diagonal is (Hutchinson,
1990).

Prints estimates with their standard errors beside the exact traces from `DiagHessian` and `DiagGGNExact`, and
checks those against autograd's full Hessian and GGN diagonal, and a product against autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _plots import INK, plot
from bpk.extensions import GGNMP, HMP, DiagGGNExact, DiagHessian
from bpk.hessianfree.hvp import hessian_vector_product
from bpk.utils.examples import autograd_diag_ggn_exact, autograd_diag_hessian


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Sigmoid(), nn.Linear(8, 4)))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(64, 12), torch.randint(4, (64,))
    params = list(model.parameters())

    loss = loss_fn(model(x), y)
    with bpk.backpack(HMP(), GGNMP(), DiagHessian(), DiagGGNExact()):
        loss.backward()
    exact = {
        "Hessian": torch.cat([p.diag_h.flatten() for p in params]),
        "GGN": torch.cat([p.diag_ggn_exact.flatten() for p in params]),
    }
    agree("diagonal of the Hessian", exact["Hessian"], autograd_diag_hessian(x, y, model, loss_fn))
    agree("diagonal of the GGN", exact["GGN"], autograd_diag_ggn_exact(x, y, model, loss_fn))
    v = torch.randn(1, *params[0].shape)
    want = hessian_vector_product(loss_fn(model(x), y), params[0], v[0])[0]
    agree("product with the Hessian's first block", params[0].hmp(v)[0], want)

    estimates = {}
    for matrix, field in (("Hessian", "hmp"), ("GGN", "ggnmp")):
        trace = exact[matrix].sum().item()
        print(f"trace of the {matrix}: {trace:.5f}")
        for number in (10, 100, 1000):
            draws = quadratic_forms(params, field, number)
            estimate, error = draws.mean().item(), (draws.std() / number**0.5).item()
            print(f"  {number:>4} vectors: {estimate:.5f} ± {error:.5f}")
        estimates[matrix] = trace, draws
        assert abs(estimate - trace) < 4 * error, "1000 vectors must come close"
    plot("Estimates of the trace and their standard errors", lambda axes: draw(axes, *estimates["Hessian"]))


def draw(axes: Any, trace: float, draws: Tensor) -> None:
    """The mean of the first k quadratic forms, for every k, beside the exact trace."""
    count = torch.logspace(0.7, 3, 60).long()
    mean = torch.stack([draws[:k].mean() for k in count])
    error = torch.stack([draws[:k].std() / k**0.5 for k in count])
    axes.fill_between(count, mean - error, mean + error, alpha=0.25, linewidth=0)
    axes.plot(count, mean, label="vᵀ H v, mean over random signs v")
    axes.axhline(trace, color=INK, linewidth=0.8, linestyle="--", label="exact, from DiagHessian")
    axes.set(xlabel="vectors", xscale="log", ylabel="trace of the Hessian")
    axes.legend()


def quadratic_forms(params: list[nn.Parameter], field: str, number: int) -> Tensor:
    """`[number]`: `vᵀ B v` for random signs v, with B the block diagonal of the matrix."""
    total = torch.zeros(number)
    for p in params:
        v = torch.randint(0, 2, (number, *p.shape)).to(p.dtype) * 2 - 1
        total += (v * getattr(p, field)(v)).flatten(1).sum(1)
    return total


if __name__ == "__main__":
    main()
