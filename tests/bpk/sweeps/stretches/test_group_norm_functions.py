"""`F.group_norm`, whose backward passes are not what they should be in torch (see `second_order/group_norm.py`)."""

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


# ---- columns that travel together --------------------------------------------------------------------------
SIZES = [(1, 4, 2, 2), (2, 4, 2, 2), (2, 2, 2, 1), (2, 6, 3, 3), (3, 4, 3, 2), (4, 4, 2, 4)]
"""Samples, channels, positions, groups: in most, axes of the input are as long as others that torch mistakes."""


class Narrow(nn.Module):
    """Normalises what a layer has computed, by a function."""

    def __init__(self, channels: int, length: int, groups: int, trained: bool) -> None:
        super().__init__()
        self.shape, self.groups = (channels, length), groups
        self.first, self.last = nn.Linear(channels * length, channels * length), nn.Linear(channels * length, 3)
        self.weight = nn.Parameter(torch.rand(channels) + 0.5, trained)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().unflatten(1, self.shape)
        return self.last(F.group_norm(h, self.groups, self.weight).flatten(1).sin())


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_second_derivatives(sizes: tuple[int, int, int, int], trained: bool) -> None:
    torch.manual_seed(0)
    n, channels, length, groups = sizes
    model, x, y = Narrow(channels, length, groups, trained), torch.randn(n, channels * length), torch.arange(n) % 3
    quantities = E.DiagHessian(), E.BatchDiagHessian(), E.HMP(), E.GGNMP(), E.DiagGGNExact()
    bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, raise_on_error=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_second_derivatives_of_a_layer_by_autograd(sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    n, channels, length, groups = sizes
    model = nn.Sequential(Narrow(channels, length, groups, True), nn.Tanh(), nn.Linear(3, 3))
    x, y = torch.randn(n, channels * length), torch.arange(n) % 3
    params = ("first.weight", "first.bias", "last.weight", "last.bias", "weight")
    with registered(bpk.Autodiff(Narrow, params=params)):
        quantities = E.DiagHessian(), E.BatchDiagHessian(), E.HMP(), E.DiagGGNExact()
        bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, raise_on_error=True)
