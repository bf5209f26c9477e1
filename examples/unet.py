"""A U-Net that finds the strokes of noisy digits: skip connections, group normalisation, a loss per pixel.

Concatenations, pooling and interpolation stay plain functions. A sample is an image: `grad_batch[n]` belongs to all
pixels of image `n`, and Kronecker factors sum over pixels.

Prints the error, which images have the largest gradients, and the curvature of each block; verifies both against
plain autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from _blocks import curvature, gradient_norms, verified
from _digits import load_digits
from bpk.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of a block."""
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(2, outputs), nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Two levels down; up by a transposed convolution, then by interpolation."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(1, width), double(width, 2 * width), double(2 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.join2, self.join1 = double(4 * width, width), double(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.bottom(F.max_pool2d(coarse, 2))
        x = self.join2(torch.cat([coarse, self.up2(x)], dim=1))
        x = F.interpolate(x, size=fine.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(self.join1(torch.cat([fine, x], dim=1)))


def noisy(x: Tensor) -> Tensor:
    """What the network sees."""
    return x + 0.3 * torch.randn_like(x)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    model, loss_fn = bpk.extend(UNet()), bpk.extend(nn.BCEWithLogitsLoss())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(81):
        optimizer.zero_grad()
        x = digits.train_x[torch.randint(len(digits.train_x), (32,))]
        loss = loss_fn(model(noisy(x)), (x > 0.5).float())
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step:>2}, loss {loss:.3f}")

    x, stroke = noisy(digits.test_x[:8]), (digits.test_x[:8] > 0.5).float()
    logits = model(x)
    with bpk.backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC()):
        loss_fn(logits, stroke).backward()
    wrong = ((logits > 0) != stroke.bool()).flatten(1).sum(1)
    print(f"pixels that are wrong in held-out images of {stroke[0].numel()}, and the norms of their gradients:")
    for label, count, norm in zip(digits.test_y.tolist(), wrong.tolist(), gradient_norms(model).tolist(), strict=False):
        print(f"  a {label}: {count:>2} pixels, gradient norm {norm:.3f}")
    curvature("a U-Net", model, lambda name: name.partition(".")[0])
    verified(model, loss_fn, x[:2], stroke[:2])


if __name__ == "__main__":
    main()
