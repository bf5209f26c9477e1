"""The gradient of the gradient's variance: fields can be differentiated after `backward(create_graph=True)`.

The variance of individual gradients measures the noise of mini-batch training. To train towards parameters with
less of it, one needs its own derivative. With `create_graph=True` the field `variance` is a function of the
parameters like any other: `autograd.grad` differentiates it, and `backward` adds it to `.grad`.

Prints the noise before and after some steps down its gradient; checks that gradient against autograd alone, where
each sample's gradient is taken in a loop, and along a direction against finite differences.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from _check import agree
from _plots import lines
from bpk.extensions import Variance


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")  # see model.zero_grad() below
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(3, (10,))
    params = list(model.parameters())

    def noise() -> Tensor:
        """The summed variance of the individual gradients, as a function of the parameters."""
        loss = loss_fn(model(x), y)
        with bpk.backpack(Variance()):
            loss.backward(create_graph=True)
        total = torch.stack([p.variance.sum() for p in params]).sum()
        model.zero_grad()  # breaks the reference cycle between parameters and their gradients' graphs
        return total

    total = noise()
    slopes = torch.autograd.grad(total, params)
    want_total = noise_by_loop(model, x, y)
    want = torch.autograd.grad(want_total, params)
    print(f"noise {total.item():.4e}, by a loop over samples {want_total.item():.4e}")
    for (name, _), got, reference in zip(model.named_parameters(), slopes, want, strict=True):
        agree(f"gradient of the noise with respect to {name}", got, reference, 1e-10)

    direction = [torch.randn_like(p) for p in params]
    sides = []
    for step in (1e-5, -1e-5):
        move(params, direction, step)
        sides.append(noise().detach())
        move(params, direction, -step)
    along = sum((s * d).sum() for s, d in zip(slopes, direction, strict=True))
    agree(
        "its slope along a direction, by finite differences", torch.as_tensor(along), (sides[0] - sides[1]) / 2e-5, 1e-6
    )

    print("Steps down the gradient of  loss + 20 * noise :")
    steps, noises = range(31), []
    for step in steps:
        loss = loss_fn(model(x), y)
        with bpk.backpack(Variance()):
            loss.backward(create_graph=True)
        penalty = 20 * torch.stack([p.variance.sum() for p in params]).sum()
        penalty.backward()  # adds to .grad
        noises.append(penalty.item() / 20)
        if step % 10 == 0:
            print(f"  step {step:>2}: loss {loss.item():.4f}, noise {noises[-1]:.4e}")
        move(params, [p.grad.detach() for p in params], -0.2)
        model.zero_grad()
    lines("Steps down the gradient of loss + 20 noise", "step", "noise: summed variance", {"": (steps, noises)})
    after = noise().item()
    assert after < 0.9 * total.item(), "the noise must go down"


def noise_by_loop(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same noise by one backward pass for each sample."""
    params = list(model.parameters())
    rows = []
    with bpk.disable():
        for xn, yn in zip(x.split(1), y.split(1), strict=True):
            grads = torch.autograd.grad(cross_entropy(model(xn), yn) / len(x), params, create_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).var(0, correction=0).sum()


@torch.no_grad()
def move(params: list[nn.Parameter], direction: list[Tensor], step: float) -> None:
    """Move the parameters along a direction."""
    for p, d in zip(params, direction, strict=True):
        p.add_(d, alpha=step)


if __name__ == "__main__":
    main()
