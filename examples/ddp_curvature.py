"""Curvature in many processes: training with DDP, and a data set that ranks share.

    torchrun --nproc-per-node 2 examples/ddp_curvature.py

(or without `torchrun`, in one process: the numbers are the same). A small network is trained by
`DistributedDataParallel`; every step's gradient noise is that of the global batch (`bpk.distributed.all_reduce`). Then
Kronecker factors and the GGN diagonal of the whole data set are added up, each rank taking its share of the batches
(`bpk.accumulate`).

Prints losses and gradient noise, and compares both results with autograd on all samples at once.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import bpk
from _check import agree
from bpk.extensions import KFLR, DiagGGNExact, Variance
from bpk.utils.examples import autograd_diag_ggn_exact

SAMPLES, BATCH, STEPS = 480, 48, 10


def step(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Train on this rank's part of a batch; returns the noise of the gradient of the whole batch, relative to it."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer.zero_grad()
    extension = Variance()
    with bpk.backpack(extension):
        loss_fn(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    bpk.distributed.all_reduce(model, extension)
    noise = sum(len(x) ** 2 * p.variance.sum() for p in model.parameters())  # of a single sample's own gradient
    signal = sum(p.grad.square().sum() for p in model.parameters())
    optimizer.step()
    return (noise / len(x) / signal).sqrt().item()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 10)
    y = (x[:, :3] + 0.3 * torch.randn(SAMPLES, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for k in range(STEPS):
        batch = slice(k * BATCH, (k + 1) * BATCH)
        noise = step(parallel, loss_fn, x[batch], y[batch], optimizer)
        if first:
            print(f"step {k}: gradient noise is {noise:.2f} of the gradient")

    loader = DataLoader(TensorDataset(x, y), batch_size=50)  # ten batches, the last one smaller
    result = bpk.accumulate(model, loss_fn, loader, KFLR(), DiagGGNExact())
    if first:
        print(f"data set: loss {result.loss:.4f}, {result.samples} samples in {result.batches} batches")
        last = model[2].weight
        index = torch.arange(0, last.numel(), 5)
        offset = sum(p.numel() for p in model[0].parameters())
        want = autograd_diag_ggn_exact(x, y, model, loss_fn, idx=(index + offset).tolist())
        agree("GGN diagonal of the last layer", result["2.weight"]["diag_ggn_exact"].flatten()[index], want)
        hidden = model[:2](x).detach()
        agree("input factor of the last layer", result["2.weight"]["kflr"][1], hidden.T @ hidden / SAMPLES)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
