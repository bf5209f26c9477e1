"""Which samples pull in the same direction: inner products of individual gradients.

`GradGram` gives the inner products of all individual gradients of a parameter, `[N, N]`, and `bpk.Summed` adds them up
over parameters; the gradients themselves are not formed. Divided by norms, they are cosines: near one where two samples
ask for the same step, negative where what helps one harms the other.

Prints mean cosines within and between digits before and after training, and compares inner products with autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _digits import load_digits
from _plots import plot
from bpk.extensions import GradGram

EACH = 8
"""Images of every digit."""


def cosines(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of individual gradients of the whole model `[N, N]`."""
    total = bpk.Summed("grad_gram")
    with bpk.backpack(GradGram(), extension_hook=total):
        loss_fn(model(x), y).backward()
    norms = total["grad_gram"].diagonal().sqrt()
    return total["grad_gram"] / norms / norms[:, None]


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    chosen = torch.cat([(digits.train_y == digit).nonzero()[:EACH, 0] for digit in range(10)])
    x, y = digits.train_x[chosen].double(), digits.train_y[chosen]
    layers = nn.Flatten(), nn.Linear(digits.size**2, 32), nn.ReLU(), nn.Linear(32, 10)
    model, loss_fn = bpk.extend(nn.Sequential(*layers).double()), bpk.extend(nn.CrossEntropyLoss())

    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    found = {"before": cosines(model, loss_fn, x, y)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        batch = torch.randperm(len(digits.train_x))[:100]
        optimizer.zero_grad()
        with bpk.disable():
            loss_fn(model(digits.train_x[batch].double()), digits.train_y[batch]).backward()
        optimizer.step()
    found["after"] = cosines(model, loss_fn, x, y)
    for when, matrix in found.items():
        between = matrix[y[:, None] != y].mean()
        print(f"{when} training: mean cosine of the same digit {matrix[same].mean():.2f}, of others {between:.2f}")

    def draw(axes: Any) -> None:
        shown = axes.imshow(found["after"].numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
        places = [EACH * digit + EACH / 2 for digit in range(10)]
        axes.set(xticks=places, yticks=places, xticklabels=range(10), yticklabels=range(10))
        axes.set(xlabel="digit", ylabel="digit")
        axes.figure.colorbar(shown, label="cosine of gradients")

    plot("Who pulls with whom", draw, (4.6, 3.7))

    rows = []
    for n in range(4):
        loss = loss_fn(model(x[[n]]), y[[n]])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    unit = nn.functional.normalize(torch.stack(rows))
    agree("cosines", found["after"][:4, :4], unit @ unit.T)
    assert found["after"][same].mean() > found["after"][y[:, None] != y].mean()


if __name__ == "__main__":
    main()
