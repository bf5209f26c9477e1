"""A physics-informed network: Poisson's equation, its Laplacian forward.

`-Δu = f` in the unit cube, `u = 0` at its boundary. The network is multiplied with a function that vanishes there, and
trained so that the residual `Δu + f` is small at random points. `f` is chosen such that the solution is known. The
Laplacian comes from one forward pass (`bpk.laplacian`); its gradient in the parameters from autograd, as usual.

Prints the error against the solution in two and in five dimensions, and compares a Laplacian with autograd.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

import bpk
from _check import agree


class Trial(nn.Module):
    """A function on the unit cube that is zero at the boundary."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(2 * x - 1) * (4 * x * (1 - x)).prod(1, keepdim=True)


def solution(x: Tensor) -> Tensor:
    """`u(x) = prod_i sin(pi x_i)`, for which `f = d pi² u`."""
    return torch.sin(math.pi * x).prod(1, keepdim=True)


def train(dim: int, width: int, points: int, steps: int) -> tuple[Trial, float]:
    """Adam on the mean squared residual at new random points in each step; the relative error of the result."""
    trial = Trial(dim, width)
    optimizer = torch.optim.Adam(trial.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = torch.rand(points, dim)
        residual = bpk.laplacian(trial, x) / (dim * math.pi**2) + solution(x)
        optimizer.zero_grad()
        residual.square().mean().backward()
        optimizer.step()
        schedule.step()
    x = torch.rand(10_000, dim)
    with torch.no_grad():
        return trial, ((trial(x) - solution(x)).norm() / solution(x).norm()).item()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    for dim, width, points, steps in ((2, 32, 256, 200), (5, 64, 256, 200)):
        start = time.process_time()
        trial, error = train(dim, width, points, steps)
        seconds = time.process_time() - start
        print(f"{dim} dimensions: relative error {error:.1e} after {steps} steps ({seconds:.0f} s)")

    x = torch.rand(4, 5, requires_grad=True)
    slope = torch.autograd.grad(trial(x).sum(), x, create_graph=True)[0]
    second = [torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(5)]
    agree("Laplacian", bpk.laplacian(trial, x), torch.stack(second).sum(0)[:, None])


if __name__ == "__main__":
    main()
