"""Layers that are called with a number: a parameter, a statistic of the batch, one entry after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import HMP, BatchGrad, DiagGGNExact, DiagHessian


class Entries(nn.Module):
    """Calls a layer on each entry by itself, and on batches in between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.layer(x))
        each = torch.stack([torch.stack([self.layer(entry) for entry in row]) for row in h])
        return self.last(self.layer(each) * self.layer(self.first.weight.sum()))


class Standardized(Entries):
    """Divides by a statistic of the batch that has passed a layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h / (1 + self.layer(h.square().mean())))


def layers() -> list[nn.Module]:
    return [nn.Softplus(), nn.Hardtanh(), nn.PReLU(), nn.Softmax(-1), nn.Dropout(0.0), nn.Identity()]


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("use_converter", [False, True])
def test_entries(layer: nn.Module, use_converter: bool) -> None:
    torch.manual_seed(0)
    quantities = BatchGrad(), DiagGGNExact(), DiagHessian(), HMP()
    data, model = (torch.randn(3, 3), torch.randn(3, 2)), Entries(layer)
    result = bpk.verify(model, nn.MSELoss(), *data, *quantities, use_converter=use_converter, raise_on_error=True)
    assert "refused" not in str(result)


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
def test_statistics(layer: nn.Module) -> None:
    torch.manual_seed(0)
    quantities = DiagGGNExact(), DiagHessian(), HMP()
    data = torch.randn(3, 3), torch.randn(3, 2)
    result = bpk.verify(Standardized(layer), nn.MSELoss(), *data, *quantities, raise_on_error=True)
    assert "refused" not in str(result)
