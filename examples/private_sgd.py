"""Differentially private SGD: clip each sample's gradient, add them up, add noise, step.

No sample may move the model by more than the clipping norm allows, so the noise hides whether it took part.
`BatchGrad` gives the individual gradients, `BatchL2Grad` their squared norms for each parameter, which sum to those
of the whole gradient. With `reduction="sum"` both are those of each sample's own loss, not divided by the batch
size.

Prints the accuracy on handwritten digits with and without clipping and noise; checks in the first step that the
clipped sum is the one that a loop over samples finds. How much privacy the noise buys is an accountant's question,
not asked here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from _check import agree
from _digits import Digits, load_digits
from _plots import lines
from bpk.extensions import BatchGrad, BatchL2Grad

CLIP, NOISE, BATCH, STEPS, RATE, EVERY = 2.5, 1.0, 128, 150, 0.5, 10


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    digits = load_digits()
    print(f"{digits.name}: batches of {BATCH}, {STEPS} steps")
    curves = {
        "SGD": train(digits, clip=float("inf"), noise=0.0),
        f"clipped at {CLIP}": train(digits, clip=CLIP, noise=0.0),
        f"with noise {NOISE}": train(digits, clip=CLIP, noise=NOISE),
    }
    print("held-out accuracy: " + ", ".join(f"{name} {reached[-1]:.1%}" for name, reached in curves.items()))
    steps = range(EVERY, STEPS + 1, EVERY)
    lines("What privacy costs", "step", "held-out accuracy", {name: (steps, curve) for name, curve in curves.items()})
    assert curves[f"with noise {NOISE}"][-1] > 0.7, "private training must learn"


def train(digits: Digits, clip: float, noise: float) -> list[float]:
    """Train a small convolutional network; returns the accuracy on the held-out digits along the way."""
    torch.manual_seed(0)
    size = (digits.size - 2) // 2
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * size**2, 10))
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    reached = []
    for step in range(1, STEPS + 1):
        # every sample takes part by itself with the same probability, as the privacy analysis has it
        taken = torch.rand(len(digits.train_x)) < BATCH / len(digits.train_x)
        x, y = digits.train_x[taken], digits.train_y[taken]
        loss = loss_fn(model(x), y)
        with bpk.backpack(BatchGrad(), BatchL2Grad()):
            loss.backward()
        clipped = clipped_sums(model, clip)
        if step == 1 and noise:
            check_against_loop(model, x, y, clip, clipped)
        with torch.no_grad():
            for p, total in zip(model.parameters(), clipped, strict=True):
                blurred = total + noise * clip * torch.randn_like(total) if noise else total
                p -= RATE * blurred / BATCH
            if step % EVERY == 0:
                reached.append((model(digits.test_x).argmax(1) == digits.test_y).float().mean().item())
    return reached


def clipped_sums(model: nn.Module, clip: float) -> list[Tensor]:
    """`sum_n min(1, clip / |g_n|) g_n` for each parameter, where |g_n| is the norm over all parameters."""
    norms = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0).sqrt()
    factors = (clip / norms).clamp(max=1)
    return [torch.einsum("n,n...->...", factors, p.grad_batch) for p in model.parameters()]


def check_against_loop(model: nn.Module, x: Tensor, y: Tensor, clip: float, clipped: list[Tensor]) -> None:
    """The same sum by one backward pass for each sample."""
    params = list(model.parameters())
    want = [torch.zeros_like(p) for p in params]
    over = 0
    for xn, yn in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(cross_entropy(model(xn), yn), params)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        over += int(norm > clip)
        for total, g in zip(want, grads, strict=True):
            total += g * min(1.0, clip / norm.item())
    for (name, _), got, reference in zip(model.named_parameters(), clipped, want, strict=True):
        agree(f"clipped sum of {name}, {over} of {len(x)} clipped", got, reference)


if __name__ == "__main__":
    main()
