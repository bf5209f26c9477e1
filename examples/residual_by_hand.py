"""A residual network whose forward pass is written by hand, in first and second order.

Layers with parameters are modules; what lies between them (`relu`, `+`, `flatten`) are plain functions. `bpk`
follows autograd's graph through them, so that neither custom modules nor the converter are needed, and `h +=
shortcut` works.

Prints the shapes of all fields; checks one sample's gradient against a backward pass of its own, and ten entries of
the GGN diagonal against autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import bpk
from _check import agree, compare_diag_ggn, needs, shapes
from bpk.extensions import BatchGrad, DiagGGNExact
from bpk.utils.examples import load_one_batch_mnist


class Residual(nn.Module):
    """Two convolutions with a shortcut around them, and a linear layer."""

    def __init__(self, channels: int = 1, hidden: int = 5, size: int = 28, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, hidden, 3, padding=1)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1)
        self.linear1 = nn.Linear(hidden * size**2, classes)
        self.shortcut = nn.Conv2d(channels, hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(relu(self.conv1(x)))
        h += self.shortcut(x)
        return self.linear1(h.flatten(1))


def main() -> None:
    needs("sklearn")  # for its digits, where MNIST is not at hand
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    x, y = load_one_batch_mnist(batch_size=32, download=False)
    model = bpk.extend(Residual())

    print("First order: the loss need not be extended, and may be any function")
    loss = cross_entropy(model(x), y, reduction="sum")
    with bpk.backpack(BatchGrad()):
        loss.backward()
    shapes(model, "grad_batch")

    sample = 1
    model.zero_grad()
    cross_entropy(model(x[[sample]]), y[[sample]]).backward()
    for name, p in model.named_parameters():
        agree(f"grad_batch[{sample}] of {name}", p.grad_batch[sample], p.grad)

    print("Second order: it starts at the loss's Hessian, so the loss is extended too")
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(x), y)
    with bpk.backpack(DiagGGNExact()):
        loss.backward()
    shapes(model, "diag_ggn_exact")
    compare_diag_ggn(x, y, model, loss_fn)


if __name__ == "__main__":
    main()
