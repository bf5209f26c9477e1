"""Private training with an accountant: how much privacy clipping and noise buy.

As in the example on private SGD, each sample's gradient is clipped, and noise is added to the sum. Here `ClippedGrad`
clips in the backward pass, without any individual gradient: what layers have read is kept until the norms of all
parameters are known. Opacus' accountant (`pip install '.[dp]'`) says what (epsilon, delta) the steps so far have cost.

Prints epsilon and accuracy along the way; checks in the first step that the sum is the one that a loop over samples
finds, and that no sample's share is larger than the clipping norm.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bpk
from _check import agree, needs
from _digits import load_digits
from _plots import lines
from bpk.extensions import ClippedGrad

CLIP, NOISE, BATCH, STEPS, RATE, DELTA, EVERY = 2.5, 1.5, 128, 200, 0.5, 1e-4, 20


def main() -> None:
    needs("opacus", extra="dp")
    from opacus.accountants import RDPAccountant

    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    size = (digits.size - 2) // 2
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * size**2, 10))
    # samples are drawn at random, so their number is, too: a sum does not tell it, and a mean would
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    clipping, accountant = ClippedGrad(CLIP, loss_reduction="sum"), RDPAccountant()
    rate = BATCH / len(digits.train_x)
    spent, reached = [], []
    for step in range(1, STEPS + 1):
        taken = torch.rand(len(digits.train_x)) < rate
        x, y = digits.train_x[taken], digits.train_y[taken]
        with bpk.backpack(clipping):
            loss_fn(model(x), y).backward()
        if step == 1:
            check_against_loop(model, x, y, clipping)
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * (p.clipped_grad + NOISE * CLIP * torch.randn_like(p)) / BATCH
        accountant.step(noise_multiplier=NOISE, sample_rate=rate)
        if step % EVERY == 0:
            with torch.no_grad():
                reached.append((model(digits.test_x).argmax(1) == digits.test_y).float().mean().item())
            spent.append(accountant.get_epsilon(DELTA))
            print(f"step {step:3}: epsilon {spent[-1]:.2f} at delta {DELTA:g}, held-out accuracy {reached[-1]:.1%}")
    lines("What accuracy costs", "epsilon", "held-out accuracy", {f"noise {NOISE}": (spent, reached)})
    assert reached[-1] > 0.7, "private training must learn"


def check_against_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, clipping: ClippedGrad) -> None:
    """The same sum and norms by one backward pass for each sample."""
    params = list(model.parameters())
    want, norms = [torch.zeros_like(p) for p in params], []
    for xn, yn in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(cross_entropy(model(xn), yn), params)
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
        share = [g * min(1.0, CLIP / norms[-1].item()) for g in grads]
        assert torch.cat([g.flatten() for g in share]).norm() <= CLIP * (1 + 1e-6)
        for total, g in zip(want, share, strict=True):
            total += g
    assert clipping.norms is not None
    agree("norms of individual gradients", clipping.norms, torch.stack(norms))
    for (name, p), reference in zip(model.named_parameters(), want, strict=True):
        agree(f"clipped sum of {name}", p.clipped_grad, reference)


if __name__ == "__main__":
    main()
