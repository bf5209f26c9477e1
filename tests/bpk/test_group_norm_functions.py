"""`F.group_norm` of images whose channels are last: torch ends the process if it is asked for parameters alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.helpers import registered

ALL = "36 ok"


class ByFunction(nn.Module):
    """Normalises by a function, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 2, self.weight, self.bias).tanh()


class Computed(ByFunction):
    """The same with a weight that is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 2, self.weight.exp(), self.bias * self.weight).tanh()


def verified(layer: nn.Module) -> str:
    """What `verify` says of a layer in a small network on images with channels last."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.Flatten(), nn.Linear(36, 3)).double()
    x = torch.randn(3, 3, 3, 3).double().to(memory_format=torch.channels_last)
    quantities = E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.BatchDiagHessian(), E.KFLR(), E.HMP()
    found = bpk.verify(model, nn.CrossEntropyLoss(), x, torch.randint(3, (3,)), *quantities, raise_on_error=True)
    return found.summary()


@pytest.mark.parametrize("kind", [ByFunction, Computed])
def test_between_layers(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert verified(kind()) == ALL


@pytest.mark.parametrize("kind", [ByFunction, Computed])
def test_in_a_layer_by_autograd(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with registered(bpk.Autodiff(kind, params=("weight", "bias"))):
        assert verified(kind()) == ALL


def test_the_layer_of_torch() -> None:
    torch.manual_seed(0)
    assert verified(nn.GroupNorm(2, 4)) == ALL
