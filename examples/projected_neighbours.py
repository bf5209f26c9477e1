"""Neighbours by gradients, from few numbers: random projections keep the angles between individual gradients.

`ProjectedGrad` multiplies every individual gradient with a random matrix of `k` rows, which is never formed, and
neither are the gradients. Angles between projections are those between gradients, with an error of about `1 /
sqrt(k)`: enough for influence scores, for near duplicates, for clusters. `bpk.accumulate` writes them to a file on
disk.

Prints how well projections of several sizes tell nearest neighbours, and compares the inner products with autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _digits import load_digits
from _plots import plot
from _training import trained
from bpk.extensions import GradGram, ProjectedGrad

SIZES = (4, 16, 64, 256)


def cosines(gram: Tensor) -> Tensor:
    norms = gram.diagonal().sqrt()
    return gram / norms / norms[:, None]


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    layers = nn.Flatten(), nn.Linear(digits.size**2, 32), nn.ReLU(), nn.Linear(32, 10)
    model = bpk.extend(trained(nn.Sequential(*layers), digits.train_x, digits.train_y, 5, 0.05).double())
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), digits.train_x[:200].double(), digits.train_y[:200]

    total = bpk.Summed("grad_gram")
    with bpk.backpack(GradGram(), extension_hook=total):
        loss_fn(model(x), y).backward()
    exact = cosines(total["grad_gram"])
    others = ~torch.eye(len(x), dtype=torch.bool)
    nearest = exact.where(others, -2.0).argmax(1)
    errors, found = list[float](), exact
    for k in SIZES:
        with bpk.backpack(ProjectedGrad(k=k)):
            loss_fn(model(x), y).backward()
        rows = torch.cat([p.projected_grad for p in model.parameters()], 1)
        found = cosines(rows @ rows.T)
        among = found.where(others, -2.0).topk(5, 1).indices
        hits = (among == nearest[:, None]).any(1).double().mean()
        errors.append(float((found - exact)[others].square().mean().sqrt()))
        print(f"k = {k:3} for each parameter: error of cosines {errors[-1]:.3f}, nearest among five {hits:.0%}")

    def draw(axes: Any) -> None:
        axes.plot(SIZES, errors, marker="o", label="measured")
        axes.plot(SIZES, [errors[0] * (SIZES[0] / k) ** 0.5 for k in SIZES], "--", color="#9aa7b1", label="1 / sqrt(k)")
        axes.set(xlabel="numbers for each parameter", ylabel="error of cosines", xscale="log", yscale="log")
        axes.legend()

    plot("Angles from few numbers", draw, (4.6, 2.6))

    rows = []
    for n in range(4):
        grads = torch.autograd.grad(loss_fn(model(x[[n]]), y[[n]]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    unit = nn.functional.normalize(torch.stack(rows))
    agree("cosines", exact[:4, :4], unit @ unit.T)
    assert errors[-1] < errors[0] / 4


if __name__ == "__main__":
    main()
