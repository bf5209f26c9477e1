"""Shared, computed and directly held parameters, and layers without rules: see `test_any_model.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.models.handwritten import Case, classified


class HyperNetwork(nn.Module):
    """A layer whose weight and bias another layer computes from a code: no sample has a part in that."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.generate, self.out = nn.Parameter(torch.randn(1, 2)), nn.Linear(2, 8), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        w = self.generate(self.code).view(-1)
        return self.out(torch.tanh(F.linear(x, w[:6].view(2, 3), w[6:])))


def hyper_network() -> Case:
    return classified(HyperNetwork(), torch.randn(4, 3))


class HyperNetworkPerSample(nn.Module):
    """A weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.generate, self.out = nn.Linear(2, 6), nn.Linear(2, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        w = self.generate(context).view(-1, 2, 3)
        return self.out(torch.tanh(torch.bmm(w, x.unsqueeze(-1)).squeeze(-1)))


def hyper_network_per_sample() -> Case:
    return classified(HyperNetworkPerSample(), torch.randn(4, 3), torch.randn(4, 2))


class LowRank(nn.Module):
    """A low-rank update of a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2)
        self.A, self.B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, self.base.weight + self.B @ self.A, self.base.bias)))


def low_rank() -> Case:
    return classified(LowRank(), torch.randn(4, 4))


class MyLinear(nn.Module):
    """A layer that `bpk` has no rule for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs) / 2), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class MySwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class MyMish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))


def layers_of_my_own() -> Case:
    model = nn.Sequential(MyLinear(3, 3), MySwish(), nn.Linear(3, 3), MyMish(), MyLinear(3, 2))
    return classified(model, torch.randn(4, 3))


class UnitRows(nn.Module):
    """A parametrisation: rows of length one. (Torch's own weight normalisation has wrong second derivatives.)"""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm(dim=1, keepdim=True)


def unit_rows() -> Case:
    first, last = nn.Linear(3, 3), nn.Linear(3, 2)
    for layer in (first, last):
        parametrize.register_parametrization(layer, "weight", UnitRows())
    return classified(nn.Sequential(first, nn.Tanh(), last), torch.randn(4, 3))


def spectral_norm() -> Case:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    return classified(model.eval(), torch.randn(4, 3))


class TiedAutoencoder(nn.Module):
    """The decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.bias = nn.Linear(4, 2), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(self.encode(x)), self.encode.weight.t(), self.bias)


def tied_autoencoder() -> Case:
    x = torch.rand(3, 4)
    return Case(TiedAutoencoder(), nn.MSELoss(), (x,), (x,))


class Lists(nn.Module):
    """Parameters in a list and a dictionary, and a bias that belongs to another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3, 3) / 2 for _ in range(2))
        self.biases = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(3)})
        self.out, self.gate = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases.values(), strict=True):
            x = torch.tanh(x @ weight + bias)
        return self.out(x) * torch.sigmoid(self.gate(x)) + self.gate.bias


def lists_of_parameters() -> Case:
    return classified(Lists(), torch.randn(4, 3))


CASES: tuple[Callable[[], Case], ...] = (
    hyper_network,
    hyper_network_per_sample,
    low_rank,
    layers_of_my_own,
    unit_rows,
    spectral_norm,
    tied_autoencoder,
    lists_of_parameters,
)
