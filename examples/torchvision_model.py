"""A model from torchvision, as it comes: SqueezeNet 1.1.

`bpk.extend(model)` is all that it takes: concatenations, in-place activations and adaptive pooling stay as they are. In
evaluation mode, because dropout would draw new numbers. Gradients that are large for few images, or curvature
that sits in few blocks, are what to look at before choosing a batch size or an optimiser.

Prints the curvature of each block, and which images have the largest gradients; verifies both against plain autograd.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import interpolate

import bpk
from _blocks import curvature, gradient_norms, verified
from _check import needs
from _digits import load_digits
from _torchvision import import_torchvision
from bpk.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian


def main() -> None:
    needs("torchvision", "sklearn")
    import_torchvision()
    from torchvision.models import squeezenet1_1

    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    x, y = interpolate(digits.train_x[:4], size=(64, 64)).expand(-1, 3, -1, -1), digits.train_y[:4]

    model = bpk.extend(squeezenet1_1(num_classes=10).eval())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC()):
        loss_fn(model(x), y).backward()

    curvature("SqueezeNet", model, lambda name: ".".join(name.split(".")[:2]))
    for label, norm in zip(y.tolist(), gradient_norms(model).tolist(), strict=True):
        print(f"  an image of a {label}: gradient norm {norm:.3f}")
    verified(model, loss_fn, x, y, passes=20)


if __name__ == "__main__":
    main()
