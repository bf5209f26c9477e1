"""A residual network as a container of modules: `Parallel` holds the branches, `SumModule` adds what they return.

No forward pass is written at all; the container defines it. `Parallel(*branches)` sends its input through every
branch and merges the results, by default with `SumModule`, which takes the place of `+`.

Prints the shapes of the GGN diagonal, checks ten of its entries against autograd, and checks that the same network
written as a function returns the same output.
"""

from __future__ import annotations

import torch
from torch import nn

import bpk
from _check import agree, compare_diag_ggn, needs, shapes
from bpk.custom_module.branching import Parallel, SumModule
from bpk.extensions import KFLR, BatchGrad, DiagGGNExact
from bpk.utils.examples import load_one_batch_mnist


def main() -> None:
    needs("sklearn")  # for its digits, where MNIST is not at hand
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    x, y = load_one_batch_mnist(batch_size=32, download=False)
    hidden = 2
    model = nn.Sequential(
        nn.Conv2d(1, hidden, 3, padding=1),
        nn.ReLU(),
        Parallel(
            nn.Identity(),  # the shortcut
            nn.Sequential(nn.Conv2d(hidden, hidden, 3, padding=1), nn.ReLU()),
            merge_module=SumModule(),
        ),
        nn.Flatten(),
        nn.Linear(hidden * 28**2, 10),
    )
    print(model)
    h = model[:2](x)
    agree("the container's forward pass, h + branch(h)", model(x), model[3:](h + model[2].branch[1](h)))

    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(x), y)
    with bpk.backpack(BatchGrad(), DiagGGNExact(), KFLR()):
        loss.backward()
    shapes(model, "grad_batch", "diag_ggn_exact")
    compare_diag_ggn(x, y, model, loss_fn)
    for name, p in model.named_parameters():
        agree(f"sum of the individual gradients of {name}", p.grad_batch.sum(0), p.grad)
    block = model[2].branch[1][0]
    agree(
        "diagonal of the bias's block in KFLR, inside the branch", block.bias.kflr[0].diag(), block.bias.diag_ggn_exact
    )


if __name__ == "__main__":
    main()
