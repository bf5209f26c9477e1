"""Where a network knows nothing: the band of a Laplace approximation around a regression.

A small network is fitted to points on both sides of a gap. Kronecker factors of its GGN give a Gaussian over its
weights, and `bpk.predictive_covariance` the variance of its outputs, without Jacobians: small at the points, large in
the gap and outside.

Prints standard deviations at the points and in the gap, and compares variances with those by autograd's Jacobians.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bpk
from _check import agree
from _plots import COLOURS, plot
from bpk.extensions import KFLR
from bpk.kernels import Kronecker
from bpk.utils.kroneckers import kfacs_to_mat

NOISE, PRIOR = 0.1, 1.0


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    x = torch.cat([torch.rand(40, 1) * 2 - 4, torch.rand(40, 1) * 2 + 1]).double()
    y = x.sin() + NOISE * torch.randn_like(x)
    model = bpk.extend(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double())
    loss_fn = bpk.extend(nn.MSELoss())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1500):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    with bpk.backpack(KFLR()):
        loss_fn(model(x), y).backward()
    posterior = Kronecker.of(model, "kflr", prior_precision=PRIOR, scale=len(x) / 2 / NOISE**2)
    places = torch.linspace(-6, 5, 120).double()[:, None]
    deviation = bpk.predictive_covariance(model, places, posterior).flatten().sqrt()
    mean = model(places).detach().flatten()

    at_points = bpk.predictive_covariance(model, x, posterior).mean().sqrt()
    at_gap = bpk.predictive_covariance(model, torch.zeros(1, 1).double(), posterior).mean().sqrt()
    print(f"standard deviation at the points {at_points:.2f}, in the gap {at_gap:.2f}, noise {NOISE}")

    def draw(axes: Any) -> None:
        at = places.flatten()
        axes.fill_between(at, mean - 2 * deviation, mean + 2 * deviation, color=COLOURS[0], alpha=0.25, linewidth=0)
        axes.plot(at, mean, color=COLOURS[0])
        axes.plot(x.flatten(), y.flatten(), "o", color=COLOURS[1], markersize=3)
        axes.set(xlabel="input", ylabel="output", ylim=(-4, 4))

    plot("Two standard deviations", draw, (4.6, 3.0))

    total = torch.zeros(3).double()
    for p in model.parameters():
        each = [torch.autograd.grad(out, p, retain_graph=True)[0] for out in model(places[::50]).flatten()]
        rows = torch.stack(each).flatten(1)
        precision = posterior.scale * kfacs_to_mat(p.kflr) + PRIOR * torch.eye(p.numel()).double()
        total += torch.einsum("np,pq,nq->n", rows, torch.linalg.inv(precision), rows)
    agree("variances", deviation[::50].square(), total)
    assert at_gap > 2 * at_points, "the network must know less in the gap"


if __name__ == "__main__":
    main()
