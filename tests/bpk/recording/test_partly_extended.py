"""A model of which only a part was extended: fields for what that part holds, and for nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import bpk
from bpk import extensions as E
from bpk.context import CTX
from bpk.extensions.backprop_extension import BackpropExtension
from tests.helpers import FIELDS

N = 5
EVERY = [e for e in FIELDS if e not in (E.DiagGGNMC, E.BatchDiagGGNMC, E.SqrtGGNMC, E.KFAC)]


class Net(nn.Module):
    """A backbone, a head, and a parameter in between that the model holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())
        self.shift, self.head = nn.Parameter(torch.rand(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) + self.shift)


def with_fields(model: nn.Module, fields: set[str]) -> set[str]:
    """The names of parameters that have all of these fields; no other may have any."""
    found = {name: fields & vars(p).keys() for name, p in model.named_parameters()}
    assert all(have in (set(), fields) for have in found.values()), found
    return {name for name, have in found.items() if have}


def step(model: nn.Module, loss_fn: nn.Module, *exts: BackpropExtension, **options: Any) -> None:
    """One backward pass."""
    torch.manual_seed(1)
    x, y = torch.randn(N, 4).double(), torch.arange(N) % 3
    with bpk.backpack(*exts, **options):
        loss_fn(model(x), y).backward()


def quantities(module: nn.Module, *fields: str) -> dict[str, Any]:
    """Fields by parameter and name."""
    return {f"{n} {f}": getattr(p, f) for n, p in module.named_parameters() for f in fields}


@pytest.mark.parametrize("extension", EVERY, ids=lambda e: e.__name__)
def test_last_layer(extension: type[BackpropExtension]) -> None:
    """Only the head gets the field, and the one that it gets if all that comes before is a constant."""
    torch.manual_seed(0)
    model, loss_fn = Net().double(), bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model.head)
    field = FIELDS[extension]
    step(model, loss_fn, extension())
    assert with_fields(model, {field}) == {"head.weight", "head.bias"}
    assert all(p.grad is not None for p in model.parameters())
    frozen = copy.deepcopy(model)
    for p in (*frozen.backbone.parameters(), frozen.shift):
        p.requires_grad_(False)
    step(frozen, loss_fn, extension())
    for p, q in zip(model.head.parameters(), frozen.head.parameters(), strict=True):
        one, other = getattr(p, field), getattr(q, field)
        if field in ("hmp", "ggnmp", "pchmp"):
            one, other = one(torch.ones_like(p)[None]), other(torch.ones_like(p)[None])
        torch.testing.assert_close(one, other)


def test_nothing_is_sent_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain autograd before the part is not asked for anything."""
    import bpk.plan.graph

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a product with the part that was not extended")

    model, loss_fn = Net().double(), bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model.head)
    monkeypatch.setattr(bpk.plan.graph, "pull_columns", never)
    step(model, loss_fn, E.BatchGrad(), E.KFLR(), E.DiagHessian(), E.HMP(), E.KFRA())


def test_several_parts() -> None:
    """The second and the last layer, with others in between: the former's columns pass what was not extended."""
    torch.manual_seed(0)
    model, loss_fn = Net().double(), bpk.extend(nn.CrossEntropyLoss())
    whole = bpk.extend(copy.deepcopy(model))
    bpk.extend(model.backbone[2])
    bpk.extend(model.head)
    exts, fields = (E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()), ("grad_batch", "diag_ggn_exact", "diag_h")
    step(model, loss_fn, *exts)
    step(whole, loss_fn, *exts)
    assert with_fields(model, {*fields}) == {
        f"{part}.{n}" for part in ("backbone.2", "head") for n in ("weight", "bias")
    }
    for part in ("backbone.2", "head"):
        mine, theirs = (quantities(m.get_submodule(part), *fields) for m in (model, whole))
        torch.testing.assert_close(mine, theirs)


def test_parameters_that_no_module_holds() -> None:
    """A script's own parameter, used behind an extended model, has `.grad` and no field."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(4, 3).double()), bpk.extend(nn.CrossEntropyLoss())
    scale = nn.Parameter(torch.rand(3).double())
    x, y = torch.randn(N, 4).double(), torch.arange(N) % 3
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss_fn(model(x) * scale, y).backward()
    assert scale.grad is not None
    assert not vars(scale)
    torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
    assert hasattr(model.weight, "diag_ggn_exact")


def test_parametrised_part() -> None:
    """What a parametrisation computes a weight of belongs to the extended layer."""
    model, loss_fn = Net().double(), bpk.extend(nn.CrossEntropyLoss())
    parametrizations.weight_norm(model.backbone[0])
    parametrizations.weight_norm(model.head)
    bpk.extend(model.head)
    step(model, loss_fn, E.BatchGrad(), E.DiagGGNExact())
    found = with_fields(model, {"grad_batch", "diag_ggn_exact"})
    assert found == {f"head.{name}" for name, _ in model.head.named_parameters()}
    assert len(found) == 3


class Tied(nn.Module):
    """The first and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("part", ["first", "last"])
def test_tied_weights(part: str) -> None:
    """The field of a shared weight is that of the weight: all of its uses count."""
    torch.manual_seed(0)
    model, loss_fn = Tied().double(), bpk.extend(nn.CrossEntropyLoss())
    whole = bpk.extend(copy.deepcopy(model))
    bpk.extend(model.get_submodule(part))
    exts, fields = (E.BatchGrad(), E.Variance(), E.DiagGGNExact()), ("grad_batch", "variance", "diag_ggn_exact")
    step(model, loss_fn, *exts)
    step(whole, loss_fn, *exts)
    assert with_fields(model, {*fields}) == {"first.weight", f"{part}.bias"}
    for field in fields:
        torch.testing.assert_close(getattr(model.first.weight, field), getattr(whole.first.weight, field))


def test_layers_that_are_put_in_later() -> None:
    """A layer that takes the place of another in an extended model is held by that model."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Net().double()), bpk.extend(nn.CrossEntropyLoss())
    model.head = nn.Sequential(nn.Linear(4, 3)).double()
    step(model, loss_fn, E.BatchGrad())
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_converted_part() -> None:
    """The converter's modules hold the parameters of the part that they were made from."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.linear(x)) * self.scale

    model, loss_fn = Net().double(), bpk.extend(nn.CrossEntropyLoss())
    model.head = bpk.extend(Head().double(), use_converter=True)
    step(model, loss_fn, E.BatchGrad(), E.DiagGGNExact())
    assert with_fields(model, {"grad_batch", "diag_ggn_exact"}) == {
        f"head.{name}" for name, _ in model.head.named_parameters()
    }


def test_removed_hooks_end_it() -> None:
    """What is extended no more holds nothing."""
    model, loss_fn = bpk.extend(Net().double()), nn.CrossEntropyLoss()
    CTX.remove_hooks()
    bpk.extend(model.head), bpk.extend(loss_fn)
    step(model, loss_fn, E.BatchGrad())
    assert with_fields(model, {"grad_batch"}) == {"head.weight", "head.bias"}


# ---- support ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inputs", [None, torch.zeros(2, 4).double()])
def test_support_lists_the_extended_part(inputs: Tensor | None) -> None:
    model = Net().double()
    bpk.extend(model.backbone[2])
    bpk.extend(model.head)
    table = bpk.support(model, E.DiagGGNExact(), inputs=inputs)
    paths = {cell.path for cell in table.cells if cell.layer == "Linear"}
    assert paths == {"backbone.2", "head"}
    assert not any("shift" in cell.layer for cell in table.cells)


def test_support_lists_no_functions_before_the_part() -> None:
    """Nothing is sent there, so there is nothing to be told."""
    model = Net().double()
    bpk.extend(model.head)
    table = bpk.support(model, E.DiagGGNExact(), E.BatchGrad(), inputs=torch.zeros(2, 4).double())
    assert {cell.path for cell in table.cells} == {"head"}


def test_support_of_a_model_that_will_be_extended() -> None:
    table = bpk.support(Net().double(), E.DiagGGNExact(), inputs=torch.zeros(2, 4).double())
    assert {cell.path for cell in table.cells if cell.layer == "Linear"} == {"backbone.0", "backbone.2", "head"}
    assert any("shift" in cell.layer for cell in table.cells)
