"""Layers, models and losses that take and return dictionaries and dataclasses, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bpk
from bpk import extensions as E
from tests.helpers import registered

pytestmark = pytest.mark.filterwarnings("ignore:.*generic way")


class Named(dict[str, Any]):
    """A dictionary whose entries are attributes, as packages have them."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class Output:
    logits: Tensor
    value: Tensor


KINDS = {"dictionary": Named, "dataclass": Output}


class Layer(nn.Module):
    """One without children, whose tensors are inside of one argument, or also beside it."""

    def __init__(self, make: Callable[..., Any], beside: bool = False) -> None:
        super().__init__()
        self.make, self.beside = make, beside
        self.weight, self.slope = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, given: dict[str, Tensor], x: Tensor | None = None) -> Any:
        x = given["x"] if x is None else x
        logits = torch.tanh(x @ self.weight) * given["scale"]
        return self.make(logits=logits, value=(logits * self.slope).sum(1))


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.before, self.scale, self.layer = nn.Linear(4, 4), nn.Linear(4, 3), layer

    def forward(self, x: Tensor) -> Any:
        h, scale = self.before(x), self.scale(x)
        return self.layer({"scale": scale}, h) if self.layer.beside else self.layer({"x": h, "scale": scale})


class Both(nn.Module):
    """A loss that is no sum of known ones, of an object with two predictions."""

    def forward(self, output: Any, y: Tensor) -> Tensor:
        terms = functional.cross_entropy(output.logits, y, reduction="none") * (1 + y) + output.value.square()
        return terms.sum() / 7


def problem() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3


def check_rows(model: nn.Module, x: Tensor, y: Tensor, loss_fn: nn.Module) -> None:
    """Individual gradients; `loss_fn` need not be extended."""
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        with bpk.disable():
            rows = [torch.autograd.grad(loss_fn(model(x[n, None]), y[n, None]), p)[0] for n in range(len(x))]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_loss_of_an_object(make: Callable[..., Any]) -> None:
    model, loss_fn = Model(Layer(make)).double(), Both()
    quantities = E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.BatchL2Grad(), E.KFLR()
    assert bpk.verify(model, loss_fn, *problem(), *quantities, raise_on_error=True).summary() == "30 ok"
    check_rows(bpk.extend(model), *problem(), bpk.extend(loss_fn))


class Opaque:
    """What nothing looks into."""

    def __init__(self, **given: Tensor) -> None:
        vars(self).update(given)


def test_a_loss_of_an_object_that_nothing_looks_into() -> None:
    model, loss_fn = bpk.extend(Model(Layer(Opaque)).double()), bpk.extend(Both())
    x, y = problem()
    with bpk.backpack(E.DiagGGNExact()), pytest.raises(RuntimeError, match="in tuples, dictionaries, dataclasses"):
        loss_fn(model(x), y).backward()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_parameters_of_a_layer_that_returns_an_object(make: Callable[..., Any]) -> None:
    """They have fields, with a loss that is not extended, too."""
    check_rows(bpk.extend(Model(Layer(make)).double()), *problem(), Both())


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.layer, self.slope, self.decay = nn.Linear(4, 3), nn.Parameter(torch.ones(3)), decay

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.layer(x) * self.slope
        loss = functional.cross_entropy(logits, y)
        return {"loss": loss + self.decay * logits.square().mean() if self.decay else loss, "logits": logits}


def test_a_loss_that_is_a_function_inside_of_the_model() -> None:
    """Parameters that functions use in front of it have fields where it is known what the loss is."""
    model, (x, y) = bpk.extend(WithLoss(0.1).double()), problem()
    with bpk.backpack(E.BatchGrad()), pytest.warns(UserWarning, match=r"'slope'(?s:.*)loss inside of the model"):
        model(x, y)["loss"].backward()
    model, loss_fn = bpk.extend(WithLoss(0).double()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad()):
        model(x, y)["loss"].backward()
    inside = model.slope.grad_batch
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss_fn(model(x, y)["logits"], y).backward()
    assert model.slope.grad_batch.shape == (5, 3)
    torch.testing.assert_close(inside, model.slope.grad_batch)


@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_a_layer_without_description_that_takes_a_dictionary(beside: bool) -> None:
    """What is inside of it may depend on other layers: the call is autograd's."""
    with registered(bpk.Autodiff(Layer, params=("weight", "slope"))):
        model = bpk.extend(Model(Layer(Named, beside)).double())
        check_rows(model, *problem(), Both())
        check_rows(model, *problem(), bpk.extend(Both()))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_support_of_a_model_that_returns_an_object(make: Callable[..., Any]) -> None:
    table = bpk.support(Model(Layer(make)), E.KFAC(), inputs=problem()[0].float())
    assert {"before", "scale"} <= {path for path, _ in table.layers} and not table.refused
