"""What Shampoo and SOAP keep: second moments of individual gradients along the axes of a weight.

`AxisGram` gives for each axis of a parameter `sum_n G_n G_n^T` with the gradients `G_n` unfolded along that axis, and
does not form these where layers are linear. Shampoo multiplies gradients with a root of their inverses, from the left
and from the right; SOAP runs Adam in their eigenbases. That pays where a few directions hold most of the moment.

Prints in how few directions nine tenths of each moment lie, and compares the matrices with autograd.
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
from bpk.extensions import AxisGram


def share(moment: Tensor) -> Tensor:
    """How much of the trace the largest eigenvalues hold, from one of them to all."""
    values = torch.linalg.eigvalsh(moment).flip(0).clamp(min=0)
    return values.cumsum(0) / values.sum()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    layers = nn.Flatten(), nn.Linear(digits.size**2, 32), nn.ReLU(), nn.Linear(32, 10)
    model = bpk.extend(trained(nn.Sequential(*layers), digits.train_x, digits.train_y, 5, 0.05).double())
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), digits.train_x[:500].double(), digits.train_y[:500]
    with bpk.backpack(AxisGram()):
        loss_fn(model(x), y).backward()
    found: dict[str, Tensor] = {}
    for name, layer in (("first layer", model[1]), ("last layer", model[3])):
        for axis, moment in zip(("outputs", "inputs"), layer.weight.axis_gram, strict=True):
            found[f"{name}, {axis}"] = share(moment)
    for name, shares in found.items():
        print(f"{name}: nine tenths in {int((shares < 0.9).sum()) + 1} of {len(shares)} directions")

    def draw(axes: Any) -> None:
        for name, shares in found.items():
            axes.plot(range(1, 1 + len(shares)), shares.numpy(), label=name)
        axes.axhline(0.9, color="#9aa7b1", linewidth=0.8, linestyle="--")
        axes.set(xlabel="directions", ylabel="share of the moment", xscale="log")
        axes.legend()

    plot("How few directions gradients have", draw, (4.6, 2.8))

    weight = model[3].weight
    left, right = torch.zeros(10, 10).double(), torch.zeros(32, 32).double()
    for n in range(len(x)):
        (g,) = torch.autograd.grad(loss_fn(model(x[[n]]), y[[n]]) / len(x), [weight])
        left, right = left + g @ g.T, right + g.T @ g
    for name, moment, expected in zip(("outputs", "inputs"), weight.axis_gram, (left, right), strict=True):
        agree(f"moments along the {name}", moment, expected)


if __name__ == "__main__":
    main()
