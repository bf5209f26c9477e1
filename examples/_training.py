"""How the first steps train their networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bpk.progress import followed


def trained(model: nn.Sequential, x: Tensor, y: Tensor, epochs: int, rate: float) -> nn.Sequential:
    """The classifier after some epochs of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    for _ in followed("epoch", range(epochs)):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model
