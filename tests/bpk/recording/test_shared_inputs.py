"""Layers without parameters that are given what all samples share: a parameter, or a statistic of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.custom_module.branching import SumModule
from bpk.extensions import HMP, BatchGrad, ClippedGrad, DiagGGNExact, DiagHessian

N = 4


class Compared(nn.Module):
    """Combines features with a parameter of this shape."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 6), layer, nn.Linear(6, 2)
        self.prototype = nn.Parameter(torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.layer(h, self.prototype)
        return self.last(h * found[:, None] if found.dim() == 1 else found)


def compare(model: nn.Module, *quantities: Any, use_converter: bool) -> None:
    data = torch.randn(N, 3), torch.randn(N, 2)
    result = bpk.verify(model, nn.MSELoss(), *data, *quantities, use_converter=use_converter, raise_on_error=True)
    assert "refused" not in str(result)


@pytest.mark.parametrize("layer", [nn.CosineSimilarity, nn.PairwiseDistance, SumModule])
@pytest.mark.parametrize("shape", [(6,), (1, 6), ()], ids=str)
@pytest.mark.parametrize("use_converter", [False, True])
def test_parameters(layer: type[nn.Module], shape: tuple[int, ...], use_converter: bool) -> None:
    torch.manual_seed(0)
    if layer is nn.CosineSimilarity and not shape:
        pytest.skip("torch compares with vectors")
    quantities = BatchGrad(), ClippedGrad(0.1), DiagGGNExact(), DiagHessian(), HMP()
    compare(Compared(layer(), shape), *quantities, use_converter=use_converter)


class Standardized(nn.Module):
    """Functions that divide by, add and multiply with statistics of the batch: layers, when they are converted."""

    def __init__(self, statistic: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.statistic = nn.Linear(3, 6), nn.Linear(6, 2), statistic

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h / (1 + self.statistic(h.square())) + h * self.statistic(h) - self.statistic(h))


@pytest.mark.parametrize("keepdim", [True, False, None])
def test_statistics(keepdim: bool | None) -> None:
    torch.manual_seed(0)
    statistic = (lambda h: h.mean()) if keepdim is None else (lambda h: h.mean(0, keepdim=keepdim))
    compare(Standardized(statistic), DiagGGNExact(), DiagHessian(), HMP(), use_converter=True)
