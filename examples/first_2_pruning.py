"""First steps, 2: prune a network by the diagonal of the GGN.

Removing a weight `w_i` changes the loss of a trained network by about `h_i w_i^2 / 2`, with `h_i` the diagonal of its
curvature: the saliency of "optimal brain damage" (LeCun, Denker, Solla, 1989). The diagonal of the generalised
Gauss-Newton matrix is such a curvature, without negative entries, and `DiagGGNExact` gives it in one backward pass.
Weights are removed in the order of their saliency, or of their size, without training again.

Prints the accuracy on held-out digits with 50 to 95 percent of the weights gone, by both orders, and checks the
diagonal against autograd.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import bpk
from _check import compare_diag_ggn
from _digits import load_digits
from _plots import lines
from _training import trained
from bpk.extensions import DiagGGNExact

EPOCHS, SHARES = 25, (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def pruned(model: nn.Sequential, scores: list[Tensor], share: float) -> nn.Sequential:
    """A copy in which this share of the weights is zero: those with the smallest scores."""
    threshold = torch.cat([s.flatten() for s in scores]).quantile(share)
    small = copy.deepcopy(model)
    with torch.no_grad():
        for p, s in zip(small.parameters(), scores, strict=True):
            p.mul_(s > threshold if share else 1)
    return small


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    network = nn.Sequential(nn.Flatten(), nn.Linear(digits.train_x[0].numel(), 64), nn.ReLU(), nn.Linear(64, 10))
    model = trained(network, digits.train_x, digits.train_y, EPOCHS, rate=0.05)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {digits.name}")

    # the curvature of the loss along every weight, in one backward pass
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(DiagGGNExact()):
        loss_fn(model(digits.train_x), digits.train_y).backward()
    saliency = [p.diag_ggn_exact * p.detach() ** 2 / 2 for p in model.parameters()]
    size = [p.detach().abs() for p in model.parameters()]

    accuracy: dict[str, list[float]] = {"by saliency": [], "by size": []}
    print("weights gone   by saliency   by size")
    for share in SHARES:
        for name, scores in (("by saliency", saliency), ("by size", size)):
            right = pruned(model, scores, share)(digits.test_x).argmax(1) == digits.test_y
            accuracy[name].append(right.double().mean().item())
        print(f"{share:>12.0%} {accuracy['by saliency'][-1]:>13.1%} {accuracy['by size'][-1]:>9.1%}")
    curves = {name: ([100 * share for share in SHARES], [100 * a for a in values]) for name, values in accuracy.items()}
    lines("Held-out accuracy of pruned networks", "percent of the weights gone", "percent", curves)

    print("the diagonal against autograd")
    compare_diag_ggn(digits.train_x, digits.train_y, model, loss_fn, entries=3)


if __name__ == "__main__":
    main()
