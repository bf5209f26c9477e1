"""Passes that are refused, or that only tell something: what is said, and that it is true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import FAIL_SILENT, FAIL_WARN, BackpropExtension
from bpk.extensions.firstorder.base import FirstOrderBackpropExtension
from bpk.extensions.secondorder.hbp import HBP
from bpk.extensions.secondorder.strategies import BackpropStrategy, LossHessianStrategy
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import backward, data, extended, mlp


class Nonlinear(nn.Module):
    """A nonlinear function between two layers; rows may be folded, or moved, on the way."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 6), nn.Linear(3, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).unflatten(1, (2, 3))).flatten(0, 1))


def test_debug_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    model, loss_fn = bpk.extend(mlp(), debug=True), bpk.extend(nn.CrossEntropyLoss(), debug=True)
    backward(model, loss_fn, *data(), E.BatchGrad(), debug=True)
    said = capsys.readouterr().out.splitlines()
    assert "[bpk] extend 0: Contraction(Linear)" in said and "[bpk] 2 (Linear): BatchGrad" in said


def test_columns_behind_a_function_have_no_graph() -> None:
    model, loss_fn = extended(Nonlinear().double())
    x, y = data()
    with (
        pytest.raises(UnsupportedLayer, match=r"nonlinear function before 'last'(?s:.*)leave create_graph out"),
        bpk.backpack(E.DiagHessian()),
    ):
        loss_fn(model(x), y.repeat(2)).backward(create_graph=True)


@pytest.mark.parametrize("between", [torch.tanh, lambda h: h], ids=["function", "none"])
def test_kfra_where_rows_are_folded(between: Callable[[Tensor], Tensor]) -> None:
    model, loss_fn = extended(Nonlinear(between).double())
    x, y = data()
    with pytest.raises(UnsupportedLayer, match=r"rows of this call are not the samples(?s:.*)use KFLR or KFAC"):
        backward(model, loss_fn, x, y.repeat(2), E.KFRA())


def test_products_at_another_point() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.HMP())
    product = model[0].weight.hmp
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed since the backward pass(?s:.*)before optimizer\.step"):
        product(torch.ones(1, 3, 4, dtype=torch.float64))


def test_a_model_that_was_not_extended() -> None:
    model, loss_fn = mlp(), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(RuntimeError, match=r"No extended layer feeds the loss(?s:.*)bpk\.extend\(model\)"):
        backward(model, loss_fn, *data(), E.BatchGrad())


def test_square_roots_of_a_sum() -> None:
    with pytest.raises(ValueError, match="SUM with BATCH_AVERAGE"):
        HBP(loss_hessian_strategy=LossHessianStrategy.SUM, backprop_strategy=BackpropStrategy.SQRT)


@pytest.mark.parametrize("mode", [FAIL_WARN, FAIL_SILENT])
@pytest.mark.parametrize("make", [E.BatchDiagGGNExact, E.KFRA, E.BatchDiagHessian, lambda: E.ClippedGrad(1.0)])
def test_no_mode_lets_wrong_fields_pass(make: Callable[[], BackpropExtension], mode: str) -> None:
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    extension = make()
    extension.fail_mode = mode
    with pytest.raises(UnsupportedLayer, match="mixes samples"):
        backward(model, loss_fn, *data(), extension)
    assert not any(hasattr(p, extension.savefield) for p in model.parameters())


@pytest.mark.parametrize("mode", [FAIL_WARN, FAIL_SILENT])
def test_layers_without_a_module_extension(mode: str, recwarn: pytest.WarningsRecorder) -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), FirstOrderBackpropExtension("mine", fail_mode=mode))
    assert not any(hasattr(p, "mine") for p in model.parameters())
    said = [w for w in recwarn if "works through module extensions only" in str(w.message)]
    assert bool(said) is (mode == FAIL_WARN)
