"""Layers that are not what their class says, by another `forward` or by hooks: they have no rule of the class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.rules import REGISTRY


class Doubled(nn.Linear):
    """What the layers below do, in a class of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(2.0 * x))


class Standardised(nn.Conv1d):
    """`nn.Conv1d.forward` is inherited, and calls this."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean((1, 2), keepdim=True), bias)


def set_on(layer: nn.Linear) -> None:
    def forward(x: Tensor, before: Any = layer.forward) -> Tensor:
        return torch.sin(before(2.0 * x))

    layer.forward = forward  # type: ignore[method-assign]


def hooked_in_front(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    layer.register_forward_hook(lambda module, args, out: torch.sin(out), prepend=True)


def called_by_wraps(layer: Any, x: Tensor) -> Tensor:
    return torch.sin(LINEAR(layer, 2.0 * x))


def written_anew(layer: Any, x: Tensor) -> Tensor:
    return torch.sin(F.linear(2.0 * x, layer.weight, layer.bias))


LINEAR = nn.Linear.forward
update_wrapper(called_by_wraps, LINEAR)


def same_fields(one: nn.Module, other: nn.Module) -> None:
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        for model in (one, other):
            with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
                loss_fn(model(x), y).backward()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            if not p.requires_grad:
                continue
            for field in ("grad_batch", "diag_ggn_exact", "diag_h"):
                torch.testing.assert_close(getattr(p, field), getattr(q, field), msg=field)


@pytest.mark.parametrize("extended_first", [False, True])
@pytest.mark.parametrize("change", [set_on, hooked_in_front])
def test_another_forward_pass_of_one_layer(change: Callable[[nn.Linear], None], extended_first: bool) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Doubled(4, 4), nn.Linear(4, 3)).double()
    layer = nn.Linear(4, 4).double()
    layer.load_state_dict(twin[2].state_dict())
    model = nn.Sequential(*copy.deepcopy(twin[:2]), layer, copy.deepcopy(twin[3]))
    if extended_first:
        bpk.extend(model)
    change(layer)
    same_fields(bpk.extend(model), bpk.extend(twin))


def test_another_method_that_an_inherited_forward_pass_calls() -> None:
    torch.manual_seed(0)

    def net(conv: nn.Conv1d) -> nn.Module:
        return bpk.extend(
            nn.Sequential(nn.Unflatten(1, (1, 3)), conv, nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)).double()
        )

    class ByHand(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x, self.weight - self.weight.mean((1, 2), keepdim=True), self.bias)

    model, twin = net(Standardised(1, 2, 2)), net(ByHand(1, 2, 2))
    twin.load_state_dict(model.state_dict())
    same_fields(model, twin)


class Inherited(nn.Linear):
    """The forward pass of its base, whichever that is."""


@pytest.mark.parametrize("extended_first", [False, True])
@pytest.mark.parametrize("forward", [called_by_wraps, written_anew])
@pytest.mark.parametrize("kind", [nn.Linear, Inherited])
def test_another_forward_pass_of_a_class(kind: type[nn.Linear], forward: Any, extended_first: bool) -> None:
    """`nn.Linear.forward = ...`: its rule serves no layer, and serves all of them as soon as it is taken back."""
    torch.manual_seed(0)

    class Twin(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(F.linear(2.0 * x, self.weight, self.bias))

    twin = nn.Sequential(Twin(3, 4), nn.Tanh(), Twin(4, 3)).double()
    model, plain = (nn.Sequential(kind(3, 4), nn.Tanh(), kind(4, 3)).double() for _ in range(2))
    for one in (model, plain):
        one.load_state_dict(twin.state_dict())
    if extended_first:
        same_fields(bpk.extend(model), bpk.extend(plain))
    with mock.patch.object(nn.Linear, "forward", forward):
        same_fields(bpk.extend(model), bpk.extend(twin))
        assert REGISTRY.find(kind) is REGISTRY.find(model[0]) is None
    assert REGISTRY.find(kind) is REGISTRY.find(model[0]) is not None
    assert bpk.verify(model, nn.CrossEntropyLoss(), torch.randn(4, 3).double(), torch.randint(3, (4,)), E.KFLR()).ok


@pytest.mark.parametrize("on_class", [False, True])
def test_a_method_set_beside_the_forward_pass(on_class: bool) -> None:
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Conv1d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)).double())
    layer: Any = model[0]
    x, y = torch.randn(4, 2, 3).double(), torch.randint(3, (4,))

    def called(*given: Any) -> Tensor:
        return F.conv1d(given[-3].square(), *given[-2:])

    with mock.patch.object(nn.Conv1d if on_class else layer, "_conv_forward", called):
        assert REGISTRY.find(layer) is None
        assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagHessian()).ok
    assert REGISTRY.find(layer) is not None


def test_functions_whose_layer_has_another_forward_pass() -> None:
    """What stands for `F.layer_norm` is no `nn.LayerNorm` that anybody calls."""
    torch.manual_seed(0)

    def forward(layer: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x.sin(), layer.normalized_shape, layer.weight, layer.bias, layer.eps).square()

    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    with mock.patch.object(nn.LayerNorm, "forward", forward):
        result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagHessian(), E.DiagGGNExact())
    assert result.ok, result


def test_a_converted_function_whose_layer_has_another_forward_pass() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.linear(x, self.weight))

    model, x = Functional(), torch.randn(5, 4)
    with mock.patch.object(nn.Linear, "forward", written_anew), mock.patch.object(nn.ReLU, "forward", written_anew):
        converted = bpk.convert_module_to_backpack(model)
        torch.testing.assert_close(converted(x), model(x))


def test_arguments_set_on_a_layer_leave_its_rule() -> None:
    layer = nn.Bilinear(2, 3, 4)
    layer.forward = partial(layer.forward)  # type: ignore[method-assign]
    assert REGISTRY.find(layer) is REGISTRY.find(nn.Bilinear)
    other = copy.copy(layer)
    other.forward = nn.Bilinear(2, 3, 4).forward  # type: ignore[method-assign]
    assert REGISTRY.find(other) is None


class Shadowed(nn.Linear):
    """`layer.weight` is another tensor than the registered parameter."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found * 2 + found**2 if name == "weight" and self.__dict__.get("shadows") else found


class ByProperty(nn.Linear):
    """The same, by a property."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if "in_features" not in self.__dict__ or "shadows" not in self.__dict__:
            raise AttributeError("weight")
        registered = self._parameters["weight"]
        assert registered is not None
        return registered * 2 + registered**2


class Written(nn.Linear):
    """What both do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2 + self.weight**2, self.bias)


@pytest.mark.parametrize("kind", [Shadowed, ByProperty, nn.Linear])
@pytest.mark.parametrize("frozen", [False, True])
def test_another_weight_than_the_registered_one(kind: type[nn.Linear], frozen: bool) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Written(4, 4), nn.Linear(4, 3)).double()
    layer = nn.Linear(4, 4).double()
    layer.load_state_dict(twin[2].state_dict())
    layer.__class__ = kind
    layer.shadows = True  # type: ignore[assignment]
    if kind is nn.Linear:
        registered = layer._parameters["weight"]
        assert registered is not None
        registered.requires_grad_(False)
        twin[2].weight.requires_grad_(False)
        layer.__dict__["weight"] = registered * 2 + registered**2
    model = nn.Sequential(*copy.deepcopy(twin[:2]), layer, copy.deepcopy(twin[3]))
    for p, q in zip(layer.parameters(), twin[2].parameters(), strict=True):
        for one in (p, q):
            one.requires_grad_(one.requires_grad and not frozen)
    x, v = torch.randn(4, 3).double(), torch.randn(1, 4, 3).double()
    for mine, other in zip(bpk.taylor(model, x, v, 2), bpk.taylor(twin, x, v, 2), strict=True):
        torch.testing.assert_close(mine, other)
    same_fields(bpk.extend(model), bpk.extend(twin))


class Noise(nn.Module):
    """A parametrisation that draws."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


def test_a_weight_that_is_computed_is_not_computed_once_more() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    nn.utils.parametrize.register_parametrization(layer, "weight", Noise())
    layer.requires_grad_(False)
    model = bpk.extend(nn.Sequential(nn.Linear(3, 4).double(), layer, nn.Tanh(), nn.Linear(4, 3).double()))
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    torch.manual_seed(1)
    noise = torch.randn(4, 4, dtype=torch.float64)
    following = torch.rand(1)
    torch.manual_seed(1)
    with bpk.backpack(E.DiagHessian()):
        loss = loss_fn(model(x), y)
        assert torch.equal(torch.rand(1), following)
        loss.backward()
    found = model[0].weight.diag_h  # type: ignore[union-attr]
    plain = nn.Linear(4, 4).double().requires_grad_(False)
    plain.weight.copy_(layer.parametrizations.weight.original + noise)  # type: ignore[union-attr,index,operator]
    plain.bias.copy_(layer.bias)
    twin = bpk.extend(nn.Sequential(copy.deepcopy(model[0]), plain, nn.Tanh(), model[3]))
    with bpk.backpack(E.DiagHessian()):
        loss_fn(twin(x), y).backward()
    torch.testing.assert_close(found, twin[0].weight.diag_h)  # type: ignore[union-attr]
