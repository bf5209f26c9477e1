"""Layers that change between calls, overwrite their input, take numbers as arguments, or hold a parameter twice."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.firstorder.base import FirstOrderModuleExtension
from bpk.jacobians import Elementwise, Multilinear, RuleError, UnsupportedLayer
from bpk.recording.record import LIVE
from tests.helpers import registered


def check(model: nn.Module, x: Tensor) -> None:
    """The diagonal of the Hessian, and its product, against autograd."""
    model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.CrossEntropyLoss())
    y = torch.arange(len(x)) % 3
    with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian(), E.HMP()):
        loss_fn(model(x), y).backward()
    params = list(model.parameters())
    with bpk.disable():
        grads = torch.autograd.grad(loss_fn(model(x), y), params, create_graph=True)
    for p, grad in zip(params, grads, strict=True):
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in grad.flatten()]
        hessian, v = torch.stack(rows), torch.randn_like(p)
        torch.testing.assert_close(p.diag_h, hessian.diag().view_as(p))
        torch.testing.assert_close(p.diag_h_batch.sum(0), hessian.diag().view_as(p))
        torch.testing.assert_close(p.hmp(v).flatten(), hessian @ v.flatten())


class TiedInside(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(2, 2, batch_first=True)
        self.layer.weight_hh_l0 = self.layer.weight_ih_l0
        self.layer.bias_hh_l0 = self.layer.bias_ih_l0
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", (nn.RNN, nn.LSTM, nn.GRU))
def test_a_parameter_under_two_names_of_a_layer(kind: type[nn.RNNBase]) -> None:
    check(TiedInside(kind), torch.randn(4, 3, 2, dtype=torch.float64))


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp_()


def test_a_layer_of_the_users_overwrites_its_input_and_does_not_say_so() -> None:
    with registered(Elementwise("exp(x)", Overwriting)):
        check(nn.Sequential(nn.Linear(4, 5), Overwriting(), nn.Linear(5, 3)), torch.randn(4, 4, dtype=torch.float64))


class Twice(nn.Module):
    """An activation whose hyperparameter changes between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 3), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        self.act.beta = 1.0
        first = self.act(self.linear(x))
        self.act.beta = 3.0
        return first + self.act(self.linear(2 * x))


class TwiceInPlace(nn.Module):
    """A list among the hyperparameters changes between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.linear = nn.Conv2d(1, 2, 1), nn.AvgPool2d([2, 1]), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.pool(self.conv(x)).flatten(1)
        self.pool.kernel_size.reverse()
        second = self.pool(self.conv(2 * x)).flatten(1)
        self.pool.kernel_size.reverse()
        return self.linear(first + second)


def test_hyperparameters_that_change_between_calls() -> None:
    check(Twice(), torch.randn(4, 4, dtype=torch.float64))
    check(TwiceInPlace(), torch.randn(4, 1, 4, 4, dtype=torch.float64))


SETTINGS: list[tuple[nn.Module, Callable[[Any], object]]] = [
    (nn.AvgPool2d(2), lambda layer: setattr(layer, "divisor_override", 7)),
    (nn.AvgPool2d([2, 2]), lambda layer: layer.kernel_size.reverse() or layer.kernel_size.__setitem__(0, 1)),
    (nn.Upsample(size=[2, 2], mode="bilinear"), lambda layer: setattr(layer, "align_corners", True)),
]
"""Layers, and what changes one of their settings: one that is `None` at first, or a list in place."""


@pytest.mark.parametrize(("layer", "change"), SETTINGS)
def test_settings_that_change_before_the_backward_pass(layer: nn.Module, change: Callable[[Any], object]) -> None:
    layer = copy.deepcopy(layer)
    model = bpk.extend(nn.Sequential(nn.Conv2d(1, 2, 1), layer, nn.Flatten(), nn.Linear(8, 3)).double())
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(3, 1, 4, 4).double(), torch.arange(3)
    found = []
    for late in (False, True):
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            loss = loss_fn(model(x), y)
            if late:
                change(layer)
            loss.backward()
        found.append([t.clone() for p in model.parameters() for t in (p.grad_batch, p.diag_ggn_exact)])
    torch.testing.assert_close(*found)


class Keeping(nn.Linear):
    """Keeps what it was given and has returned last, as those do who look at activations."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = (x, out)
        return out


def test_tensors_that_a_layer_keeps_are_no_hyperparameters() -> None:
    """To compare them with those of the next call was an error, and a call that held its own output was never freed."""
    layer = Keeping(4, 4).double()
    check(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)), torch.randn(4, 4, dtype=torch.float64))
    model = bpk.extend(nn.Sequential(Keeping(4, 4), nn.Linear(4, 3)))
    counts = []
    for _ in range(3):
        model(torch.randn(2, 4))
        gc.collect()
        counts.append(len(LIVE))
    assert counts[0] == counts[-1]


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, scale: float | Tensor = 2.0, *, shift: Tensor | None = None) -> Tensor:
        return (x * self.a * scale).sin() + (0 if shift is None else shift)


class WithArguments(nn.Module):
    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.layer, self.use = nn.Linear(4, 3), layer, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, self.linear(x))


@pytest.mark.parametrize(
    "use",
    (
        lambda f, h: f(h, 3.0),
        lambda f, h: f(h, scale=h.cos()),
        lambda f, h: f(h, shift=h.exp()),
        lambda f, h: f(h, 3.0, shift=h.exp()),
    ),
)
def test_a_layer_without_description_is_given_arguments(use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with registered(bpk.Autodiff(Wave, params=("a",))):
        check(WithArguments(Wave(), use), torch.randn(4, 4, dtype=torch.float64))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return x @ self.w.T * scale


def test_arguments_that_a_rule_does_not_see_must_have_their_defaults() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    with registered(Multilinear("n i, o i -> n o", Scaled, params=("w",))):
        check(WithArguments(Scaled(), lambda f, h: f(h, 1.0, mask=None)), x)
        with pytest.raises(UnsupportedLayer, match="the argument 'scale'"):
            check(WithArguments(Scaled(), lambda f, h: f(h, scale=2.0)), x)


def test_names_of_parameters_that_cannot_be_right() -> None:
    with pytest.raises(RuleError, match="twice"):
        Multilinear("n i, i j, j k -> n k", Scaled, params=("w", "w"))
    with registered(bpk.Autodiff(Scaled, params=("v",))), pytest.raises(RuleError, match=r"'v'.*does not have"):
        bpk.extend(Scaled())(torch.randn(4, 3))


@pytest.mark.parametrize("outside", [False, True], ids=["forward inside of the context", "forward before it"])
def test_layers_that_return_what_they_are_given(outside: bool) -> None:
    """They are passed by; whoever asks for every layer is called at them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 4), nn.Dropout(), nn.Tanh(), nn.Identity(), nn.Dropout(), nn.Linear(4, 3))
    check(layers.eval(), torch.randn(5, 2).double())
    kept, loss_fn, seen = layers[1], bpk.extend(nn.CrossEntropyLoss()), list[nn.Module]()
    x, y = torch.randn(5, 2).double(), torch.arange(5) % 3
    with bpk.backpack(E.DiagHessian()):
        out = layers(x)
        assert {"input0", "output"} <= vars(kept).keys()
        assert kept.output.data_ptr() == layers[0].output.data_ptr()
        loss_fn(out, y).backward()
    assert "output" not in vars(kept)
    expected = layers[0].weight.diag_h
    early = loss_fn(layers(x), y) if outside else None
    with bpk.backpack(E.DiagHessian(), extension_hook=seen.append):
        (loss_fn(layers(x), y) if early is None else early).backward()
    assert set(seen) >= {*layers}
    torch.testing.assert_close(layers[0].weight.diag_h, expected)


class Shifted(nn.Module):
    """A normalisation by a function, a layer that returns what it is given, and one that works in place on that."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.act, self.last = nn.Linear(2, 4), between, nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.between(torch.nn.functional.layer_norm(self.first(x), (4,))))
        y = self.between(h * 2)
        y += h
        out: Tensor = self.last(y)
        return out


class Kept(nn.Module):
    """A layer of a user's that returns what it is given, such as stochastic depth in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x


GIVEN = [nn.Identity(), nn.Dropout().eval(), nn.Dropout(inplace=True).eval(), Kept()]


@pytest.mark.parametrize("between", GIVEN, ids=lambda m: type(m).__name__)
def test_what_they_return_may_be_changed_in_place(between: nn.Module) -> None:
    """Autograd's graph is the plain one, whose form says where samples are; who asks for every layer gets the same."""
    torch.manual_seed(0)
    model = Shifted(between)
    check(model, torch.randn(5, 2).double())
    bpk.extend(model)
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 2).double(), torch.arange(5) % 3
    seen, found = list[nn.Module](), []
    for hook in (None, seen.append):
        for inside in (True, False):
            early = None if inside else loss_fn(model(x), y)
            with bpk.backpack(E.DiagHessian(), E.BatchGrad(), extension_hook=hook):
                loss = loss_fn(model(x), y) if early is None else early
                names = {type(node).__name__ for node in between_nodes(loss)}
                loss.backward()
            assert "CopySlices" not in names or (inside and hook is not None)
            found.append([p.diag_h for p in model.parameters()] + [p.grad_batch for p in model.parameters()])
    assert set(seen) >= {*model.children()}
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def between_nodes(loss: Tensor) -> set[Any]:
    """All functions in the graph of a loss."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
    return seen


def test_a_module_extension_of_one_that_was_not_recorded_is_refused() -> None:
    model, loss_fn = bpk.extend(Shifted(nn.Identity()).double()), bpk.extend(nn.CrossEntropyLoss())
    extension = E.BatchGrad()
    extension.set_module_extension(nn.Identity, FirstOrderModuleExtension())
    loss = loss_fn(model(torch.randn(5, 2).double()), torch.arange(5) % 3)
    refused = pytest.raises(UnsupportedLayer, match=r"(?s)module extension for Identity.*inside of backpack")
    with refused, bpk.backpack(extension):
        loss.backward()
