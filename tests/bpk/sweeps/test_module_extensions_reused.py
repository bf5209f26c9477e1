"""Module extensions of layers and parameters that are used several times, and beside extensions without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.module_extension import ModuleExtension
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.bpk.extensions.test_custom_extension import Scale, ScaleBatchGrad, ScaleDiagGGN
from tests.helpers import backward, data
from tests.references.reference import Reference


class Cubic(nn.Module):
    """A layer without parameters, which is called at several places."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3 + x


class CubicDiagGGN(ModuleExtension):
    """The way through it, from the input that the layer has kept."""

    def backpropagate(self, ext: Any, module: nn.Module, grad_inp: Any, grad_out: Any, bpQuantities: Tensor) -> Tensor:
        return bpQuantities * (3 * module.input0**2 + 1)


@pytest.mark.parametrize("features", [4, 5])
@pytest.mark.parametrize("extension", [E.DiagGGNExact, E.BatchGrad])
def test_each_call_is_handed_its_own_tensors(features: int, extension: type) -> None:
    again = Cubic()
    model = nn.Sequential(again, nn.Linear(4, features), again, nn.Linear(features, 4), again, nn.Linear(4, 3)).double()
    (x, y), loss_fn = data(), nn.CrossEntropyLoss(reduction="sum")
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    diagonal, other = E.DiagGGNExact(), extension()
    diagonal.set_module_extension(Cubic, CubicDiagGGN())
    backward(
        bpk.extend(model), bpk.extend(loss_fn), x, y, diagonal, *([other] if extension is not E.DiagGGNExact else [])
    )
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))
    assert not {"input0", "output"} & set(vars(again))


def called_twice() -> nn.Module:
    again = Scale()
    return nn.Sequential(again, nn.Linear(4, 4), again, nn.Linear(4, 3))


def tied() -> nn.Module:
    model = nn.Sequential(Scale(), nn.Linear(4, 5), Scale(), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    return model


class ByFunctionsToo(nn.Module):
    """The scale is a factor of a plain product as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = Scale(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.scale(x)) * self.scale.weight


@pytest.mark.parametrize("make", [called_twice, tied, ByFunctionsToo])
@pytest.mark.parametrize(
    ("extension", "written"), [(E.BatchGrad, ScaleBatchGrad), (E.DiagGGNExact, ScaleDiagGGN)], ids=["first", "second"]
)
def test_several_uses_of_a_parameter_are_refused(make: Callable[[], nn.Module], extension: type, written: type) -> None:
    """One value had overwritten another one."""
    model, loss_fn = bpk.extend(make().double()), bpk.extend(nn.CrossEntropyLoss())
    asked = extension()
    asked.set_module_extension(Scale, written())
    with pytest.raises(UnsupportedLayer, match="is used more than once"):
        backward(model, loss_fn, *data(), asked)
    assert not any(asked.savefield in vars(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("layer", "written", "other"),
    [
        (layer, written, other)
        for layer, written in ((Scale, ScaleDiagGGN), (Cubic, CubicDiagGGN))
        for other in (E.KFLR, E.KFRA, E.DiagGGNMC, E.DiagHessian, E.KFAC, E.HMP, E.BatchGrad)
        if (layer, other) != (Cubic, E.BatchGrad)
    ],
)
def test_an_extension_that_does_not_know_a_layer_by_hand(layer: type, written: type, other: type) -> None:
    """An assertion had failed; products were zero below the layer, and fields of first order were missing."""
    model = bpk.extend(nn.Sequential(nn.Linear(4, 3), layer(), nn.Linear(3, 3)).double())
    loss_fn, diagonal = bpk.extend(nn.CrossEntropyLoss()), E.DiagGGNExact()
    diagonal.set_module_extension(layer, written())
    with pytest.raises(UnsupportedLayer, match=r"no module extension for '1'(?s:.*)passes of their own"):
        backward(model, loss_fn, *data(), diagonal, other())


@pytest.mark.parametrize(("layer", "written"), [(Scale, ScaleDiagGGN), (Cubic, CubicDiagGGN)])
def test_hessians_do_not_pass_a_layer_that_is_known_by_hand_only(layer: type, written: type) -> None:
    """Its second derivative is not known: an assertion had failed."""
    model = bpk.extend(nn.Sequential(nn.Linear(4, 3), layer(), nn.Linear(3, 3)).double())
    asked = E.DiagHessian()
    asked.set_module_extension(layer, written())
    with pytest.raises(UnsupportedLayer, match="does not tell the second derivative"):
        backward(model, bpk.extend(nn.CrossEntropyLoss()), *data(), asked)
