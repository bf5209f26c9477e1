"""KFAC for a physics-informed network: curvature of a residual loss, against Adam at equal time.

Poisson's equation in five dimensions, as in `poisson_pinn.py`. A Laplacian that is differentiated is a network of its
own: value, first derivatives and Laplacian pass each linear layer side by side, and share its weight. So the residual's
loss has Kronecker factors (`approximation="expand"`; Dangel, Müller, Zeinhofer, 2024). Both optimizers have the same
time of the processor; KFAC's step is as long as a line search says, Adam's rate falls to zero.

Prints the error against the solution as time passes, and compares the GGN's diagonal of the loss with autograd.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _plots import plot
from bpk.extensions import DiagGGNExact
from poisson_pinn import Trial, solution

DIM, WIDTH, POINTS, SECONDS, LOOKS = 5, 64, 512, 6.0, 12


def residual(trial: Trial, x: Tensor) -> Tensor:
    """`Δu / (d pi²)`, which is to be `-sin(pi x_1) ... sin(pi x_d)`."""
    return bpk.laplacian(trial, x) / (DIM * math.pi**2)


def with_adam(trial: Trial) -> Callable[[float], float]:
    """A step, given which share of the time has passed; it returns the loss."""
    optimizer = torch.optim.Adam(trial.parameters(), lr=1e-2)

    def step(passed: float) -> float:
        optimizer.param_groups[0]["lr"] = 0.5e-2 * (1 + math.cos(math.pi * passed))
        x = torch.rand(POINTS, DIM)
        loss = (residual(trial, x) + solution(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def with_kfac(trial: Trial) -> Callable[[float], float]:
    """The same, with the gradient preconditioned and the best of some lengths of the step."""
    loss_fn = bpk.extend(nn.MSELoss())
    preconditioner = bpk.preconditioners.KFAC(
        trial, damping=1e-5, decay=0.9, intervals=(1, 1), mc_samples=None, approximation="expand"
    )
    params = list(trial.parameters())

    def step(passed: float) -> float:
        x = torch.rand(POINTS, DIM)
        target = -solution(x)
        trial.zero_grad()
        with preconditioner:
            loss = loss_fn(residual(trial, x), target)
            loss.backward()
        preconditioner.step()

        best, chosen = loss.item(), 0.0
        start = [p.detach().clone() for p in params]
        with torch.no_grad(), bpk.disable():
            for length in (2.0**-k for k in range(12)):
                move(params, start, length)
                reached = (residual(trial, x) - target).square().mean().item()
                if reached < best:
                    best, chosen = reached, length
                elif chosen:
                    break
        move(params, start, chosen)
        return loss.item()

    return step


@torch.no_grad()
def move(params: list[nn.Parameter], start: list[Tensor], length: float) -> None:
    """Go so far against the gradients."""
    for p, s in zip(params, start, strict=True):
        p.copy_(s - length * p.grad)


def error_of(trial: Trial) -> float:
    """Relative, at points that are always the same."""
    x = torch.rand(5000, DIM, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), bpk.disable():
        return ((trial(x) - solution(x)).norm() / solution(x).norm()).item()


def train(make: Callable[[Trial], Callable[[float], float]]) -> tuple[list[float], list[float], int]:
    """Seconds, errors after them, and how many steps there were."""
    torch.manual_seed(0)
    trial = Trial(DIM, WIDTH)
    step, steps, passed = make(trial), 0, 0.0
    seconds, errors = [0.0], [error_of(trial)]
    while passed < SECONDS:
        start = time.process_time()
        step(passed / SECONDS)
        passed += time.process_time() - start
        steps += 1
        if passed >= SECONDS * len(seconds) / LOOKS:
            seconds.append(passed)
            errors.append(error_of(trial))
    return seconds, errors, steps


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    curves, last = {}, {}
    for name, make in (("Adam", with_adam), ("KFAC", with_kfac)):
        seconds, errors, steps = train(make)
        curves[name], last[name] = (seconds, errors), errors[-1]
        print(f"{name}: relative error {errors[-1]:.1e} after {SECONDS:.0f} seconds, {steps} steps")

    def draw(axes: Any) -> None:
        for name, (seconds, errors) in curves.items():
            axes.plot(seconds, errors, label=name, marker="o", markersize=3)
        axes.set(xlabel="seconds", ylabel="relative error", yscale="log")
        axes.legend()

    plot("Poisson's equation, five dimensions", draw, (4.6, 3.0))

    torch.manual_seed(0)
    trial, loss_fn, x = bpk.extend(Trial(DIM, 4).double()), bpk.extend(nn.MSELoss()), torch.rand(6, DIM).double()
    with bpk.backpack(DiagGGNExact()):
        loss_fn(residual(trial, x), -solution(x)).backward()
    weight = trial.net[2].weight
    rows = [torch.autograd.grad(r, weight, retain_graph=True)[0] for r in residual(trial, x)]
    agree("diagonal of the GGN of the residual's loss", weight.diag_ggn_exact, 2 * torch.stack(rows).square().mean(0))
    assert last["KFAC"] < last["Adam"], "KFAC must come closer in the same time"


if __name__ == "__main__":
    main()
