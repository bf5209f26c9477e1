"""The family "weight times patches": a layer of a user's own, and convolutions to one position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import case
from bpk.jacobians.families.affine import Affine


class Pairs(nn.Module):
    """`out[n, o, t] = sum_i W[o, i] x[n, t + i] + b[o]`, for `i` of 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x.unfold(1, 2, 1).mT + self.bias[:, None]


class OfPairs(Affine):
    """What a family "weight times patches" has to give."""

    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        return call.inputs[0][samples].unfold(1, 2, 1).mT[:, None]

    def as_columns(self, call: Call, mat: Tensor) -> Tensor:
        return mat[:, :, None]

    def as_output(self, call: Call, columns: Tensor) -> Tensor:
        return columns[:, :, 0].expand(*columns.shape[:2], *call.output.shape[1:])

    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-3)

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        return matrix.squeeze(-3)

    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return call.params["weight"] @ mat.unfold(2, 2, 1).mT

    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        pulled = call.params["weight"].T @ mat  # [V, N, 2, T]
        return nn.functional.pad(pulled[..., 0, :], (0, 1)) + nn.functional.pad(pulled[..., 1, :], (1, 0))


def test_a_family_of_its_own() -> None:
    rule = OfPairs(Pairs, params=("weight", "bias"))
    assert check_rule(rule, [case(Pairs, shape=(3, 4))]).checks > 100


@pytest.mark.parametrize("groups", [1, 2])
def test_one_position(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=groups), nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.randn(3, 4, 3, 3).double(), torch.arange(3)
    quantities = (E.DiagGGNExact(), E.SumGradSquared(), E.DiagHessian(), E.Variance(), E.BatchDiagGGNExact())
    bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, entries=3, raise_on_error=True)
