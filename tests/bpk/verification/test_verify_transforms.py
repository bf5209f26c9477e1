"""Models that use transforms of `torch.func` in their forward pass: what those make has no graph while they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

import bpk
from bpk import extensions as E


class Transformed(nn.Module):
    """Forces, as the gradient of an energy for each sample, or the energy of each."""

    def __init__(self, of_layers: bool, forces: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3)) if not of_layers else None
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)) if of_layers else None
        self.forces = forces

    def energy(self, x: Tensor) -> Tensor:
        if self.layers is not None:
            return self.layers(x)
        assert self.weight is not None
        return F.softplus(self.weight @ x).sum(0, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        of_one: Callable[[Tensor], Tensor] = grad(lambda one: self.energy(one).sum()) if self.forces else self.energy
        return vmap(of_one)(x)


@pytest.mark.parametrize("forces", [True, False], ids=["forces", "energies"])
@pytest.mark.parametrize("of_layers", [True, False], ids=["layers", "functions"])
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_transforms(of_layers: bool, forces: bool) -> None:
    model, x, y = Transformed(of_layers, forces).double(), torch.randn(3, 3), torch.randn(3, 3 if forces else 1)
    bpk.verify(model, nn.MSELoss(), x, y, E.BatchGrad(), E.DiagGGNExact(), E.KFLR(), raise_on_error=True)
