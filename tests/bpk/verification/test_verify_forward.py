"""`bpk.verify` of derivatives in the input, and which rules have a Taylor product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad
from bpk.jacobians import Elementwise
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.series import Series
from bpk.plan.support import Kind
from bpk.support.matrix import taylor_matrix
from bpk.verification import Verdict

MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)),
    "convolution": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten()), torch.randn(3, 1, 5, 5)),
    "many axes": (nn.Sequential(nn.Flatten(), nn.Linear(121, 3), nn.Softmax(1)), torch.randn(3, 1, 11, 11)),
    "fused": (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.LayerNorm(3)), torch.randn(3, 4)),
    "random": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.SiLU()), torch.randn(3, 4)),
    "linear": (nn.Linear(4, 3), torch.randn(3, 4)),
    "one number": (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)), torch.randn(5, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_three_are_right(name: str) -> None:
    model, x = MODELS[name]
    result = bpk.verify(model, None, x, entries=4)
    assert [row.quantity for row in result.rows] == ["taylor", "laplacian", "input_hessian_diag"]
    assert result and all(row.verdict is Verdict.OK and row.entries for row in result.rows), result
    if name == "many axes":
        assert "along 99 of 121 axes" in result.rows[1].note


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-(x**2))


class Wrong(Elementwise):
    """The last coefficient is a little too large."""

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        found = super().taylor(call, series)
        *others, last = found.terms
        return replace(found, terms=(*others, None if last is None else last * (1 + 1e-5)))


def test_mistakes_are_found() -> None:
    rule = bpk.register(Wrong("exp(-x**2)", Bump))
    try:
        result = bpk.verify(nn.Sequential(nn.Linear(3, 3), Bump()), None, torch.randn(4, 3))
    finally:
        bpk.unregister(rule)
    assert [row.verdict for row in result.rows] == [Verdict.WRONG] * 3
    assert "bpk" in result.rows[1].note and "autograd" in result.rows[1].note


def test_beside_extensions() -> None:
    model, x = MODELS["mlp"]
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, torch.arange(5) % 2, bpk.laplacian, BatchGrad())
    assert [row.quantity for row in result.rows] == ["BatchGrad"] * 4 + ["laplacian"] and result


@pytest.mark.parametrize(
    ("model", "x", "verdict", "why"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(3, 4), Verdict.REFUSED, "mixes samples"),
        (nn.Embedding(4, 3), torch.arange(4), Verdict.UNCHECKED, "one tensor of real numbers"),
        (nn.LSTM(4, 3, batch_first=True), torch.randn(3, 2, 4), Verdict.UNCHECKED, "a row for each sample"),
    ],
)
def test_what_is_not_compared(model: nn.Module, x: Any, verdict: Verdict, why: str) -> None:
    row = bpk.verify(model, None, x, None, bpk.laplacian).rows[0]
    assert row.verdict is verdict and why in row.note


def test_a_loss_is_needed_for_extensions() -> None:
    with pytest.raises(ValueError, match="The loss is of type NoneType"):
        bpk.verify(nn.Linear(4, 3), None, torch.randn(2, 4), None, BatchGrad())


def test_the_matrix_says_what_has_a_formula() -> None:
    cells = {cell.layer: cell for cell in taylor_matrix()}
    formula = ("Linear", "Conv2d", "Tanh", "Softmax", "LayerNorm", "MaxPool2d", "Power", "MatMul")
    assert all(cells[name].kind is Kind.SUPPORTED for name in formula)
    assert all(cells[name].kind is Kind.GENERIC for name in ("LSTM", "LocalResponseNorm"))
    assert all("In some cases by nested" in cells[name].reason for name in ("MultiheadAttention", "Dropout"))
    assert "mixes samples" in cells["BatchNorm1d"].reason
