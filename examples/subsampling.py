"""Quantities of some samples only: every extension takes `subsampling=[indices]`.

The gradient is that of the whole batch, and costs what it always costs; the other quantities consider the listed
samples, in the listed order. Divisors stay those of the full batch, so that rows are equal to rows of the full
quantity, and sums over disjoint subsets add up.

Prints the shapes, and checks rows and sums against the full quantities and a loop with autograd.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bpk
from _check import agree, shape
from bpk.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, SqrtGGNExact, Variance


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5)))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(12, 20), torch.randint(5, (12,))
    weight = model[0].weight

    chosen = [7, 0, 3]
    print(f"Samples {chosen} of {len(x)}")
    loss = loss_fn(model(x), y)
    with bpk.backpack(BatchGrad(subsampling=chosen), BatchL2Grad(subsampling=chosen), SqrtGGNExact(subsampling=chosen)):
        loss.backward()
    for field in ("grad", "grad_batch", "batch_l2", "sqrt_ggn_exact"):
        print(f"  .{field}: {shape(getattr(weight, field))}")
    for row, sample in enumerate(chosen):
        own = cross_entropy(model(x[[sample]]), y[[sample]]) / len(x)
        agree(f"grad_batch[{row}], sample {sample}", weight.grad_batch[row], torch.autograd.grad(own, weight)[0])
    agree("batch_l2", weight.batch_l2, weight.grad_batch.flatten(1).square().sum(1))
    agree(
        "the gradient is still the full batch's",
        weight.grad,
        torch.autograd.grad(cross_entropy(model(x), y), weight)[0],
    )

    print("Disjoint subsets add up; extensions with different subsets share one backward pass")
    halves = [DiagGGNExact(subsampling=range(6)), DiagGGNExact(subsampling=range(6, 12))]
    for number, half in enumerate(halves):
        half.savefield = f"half{number}"
    loss = loss_fn(model(x), y)
    with bpk.backpack(DiagGGNExact(), *halves):
        loss.backward()
    agree("diag_ggn_exact of both halves", weight.half0 + weight.half1, weight.diag_ggn_exact)

    print("The variance keeps the full batch's divisor: it is not the variance among the chosen samples")
    loss = loss_fn(model(x), y)
    with bpk.backpack(BatchGrad(subsampling=chosen), Variance(subsampling=chosen)):
        loss.backward()
    g = weight.grad_batch
    agree("sum g² / N - (sum g / N)²", weight.variance, g.square().sum(0) / len(x) - (g.sum(0) / len(x)).square())


if __name__ == "__main__":
    main()
