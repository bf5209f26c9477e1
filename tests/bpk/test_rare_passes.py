"""Passes that hardly anybody starts: each is refused with its reason, or has the right fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.module_extension import ModuleExtension
from bpk.extensions.secondorder.base import SecondOrderBackpropExtension
from bpk.jacobians import Elementwise
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import backward, data, extended, registered

X, Y = data()


class Twice(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()


def test_a_rule_for_one_result_where_a_layer_returns_several() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(4, 3), Twice()

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.twice(self.first(x))
            return one + other

    with registered(Elementwise("sin(x)", Twice)):
        model, loss_fn = extended(Model().double())
        with pytest.raises(UnsupportedLayer, match="several differentiable outputs"):
            backward(model, loss_fn, X, Y, E.BatchGrad(), E.DiagGGNExact())


class Hook:
    """A hook for all modules that is an object, and has a method that is one."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.MultiMarginLoss) else None

    def double(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self(module, args, output)


@pytest.mark.parametrize(
    ("hook", "name"),
    [(Hook(), "an object of the class Hook"), (Hook().double, "'Hook.double'")],
    ids=["an object", "a method"],
)
def test_a_hook_for_all_modules_is_named(hook: Callable[..., Any], name: str) -> None:
    model, loss_fn = extended(nn.Linear(4, 3).double(), nn.MultiMarginLoss())
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.raises(RuntimeError, match=name), bpk.backpack(E.DiagGGNExact()):
            loss_fn(model(X), Y).backward()
    finally:
        handle.remove()


def test_losses_of_different_numbers_of_samples() -> None:
    """A loss of some rows is one of these samples; a row of several is none of them."""
    model, loss_fn = extended(nn.Linear(4, 3).double())
    other = bpk.extend(nn.MSELoss())
    out = model(X)
    with bpk.backpack(E.BatchGrad()):
        (loss_fn(out, Y) + other(out[:3], torch.zeros(3, 3).double())).backward()
    for n in range(len(X)):
        out = model(X[[n]])
        loss = F.cross_entropy(out, Y[[n]]) / len(X) + (F.mse_loss(out, torch.zeros_like(out)) / 3 if n < 3 else 0.0)
        (expected,) = torch.autograd.grad(loss, model.weight)
        torch.testing.assert_close(model.weight.grad_batch[n], expected)
    out = model(X)
    with pytest.raises(UnsupportedLayer, match=r"see the samples at .* differently"), bpk.backpack(E.BatchGrad()):
        (loss_fn(out, Y) + other(out[:4].reshape(2, 6), torch.zeros(2, 6).double())).backward()


class Tied(nn.Module):
    """A weight that a layer uses for one prediction, and functions for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x.sin() * self.layer.weight.sum(0)


@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_a_weight_of_a_layer_and_of_functions_behind_two_losses() -> None:
    """Whichever loss autograd comes to first, all uses count."""
    model, loss_fn, other = bpk.extend(Tied().double()), bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
    one, two = model(X)
    with bpk.backpack(E.BatchGrad()):
        (loss_fn(one, Y) + other(two, torch.zeros_like(two))).backward()
    for n in range(len(X)):
        one, two = model(X[[n]])
        loss = (F.cross_entropy(one, Y[[n]]) + F.mse_loss(two, torch.zeros_like(two))) / len(X)
        (expected,) = torch.autograd.grad(loss, model.layer.weight)
        torch.testing.assert_close(model.layer.weight.grad_batch[n], expected)


@pytest.mark.parametrize("first", [0, 1])
def test_a_layer_in_front_of_two_heads_without_a_loss(first: int) -> None:
    """What is behind the second head was not known when autograd came to the first one, and its call of the layer."""
    layer, *heads = (bpk.extend(nn.Linear(4, 4).double()) for _ in range(3))
    outputs = [heads[0](layer(X)), heads[1](layer(X.sin()).sin())]
    with bpk.backpack(E.BatchGrad(), E.SumGradSquared()):
        torch.autograd.backward([outputs[first], outputs[1 - first]], [torch.ones_like(outputs[0])] * 2)
    for n in range(len(X)):
        total = heads[0](layer(X[[n]])).sum() + heads[1](layer(X[[n]].sin()).sin()).sum()
        (expected,) = torch.autograd.grad(total, layer.weight)
        torch.testing.assert_close(layer.weight.grad_batch[n], expected)
    torch.testing.assert_close(layer.weight.sum_grad_squared, layer.weight.grad_batch.square().sum(0))


def test_a_layer_that_has_one_parameter_twice() -> None:
    model, loss_fn = nn.Sequential(nn.RNNCell(4, 4), nn.Linear(4, 3)).double(), bpk.extend(nn.CrossEntropyLoss())
    model[0].weight_ih = model[0].weight_hh
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad(), E.SumGradSquared()):
        loss_fn(model(X), Y).backward()
    weight = model[0].weight_hh
    torch.testing.assert_close(weight.grad_batch.sum(0), weight.grad)
    torch.testing.assert_close(weight.sum_grad_squared, weight.grad_batch.square().sum(0))


class FoldedBehind(nn.Module):
    """Functions with a parameter, and rows that are folded, between the last layer and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale).unflatten(1, (2, 3)).flatten(0, 1)


@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_kfra_behind_rows_that_functions_with_parameters_have_folded() -> None:
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 4), FoldedBehind()).double())
    with pytest.raises(UnsupportedLayer, match="KFRA"):
        backward(model, loss_fn, X, Y.repeat_interleave(2), E.KFRA())


class Norms(ModuleExtension):
    """Hands on more than one tensor."""

    def __init__(self) -> None:
        super().__init__(params=[])

    def backpropagate(self, ext: Any, module: nn.Module, g_inp: Any, g_out: Any, quantity: Any) -> Any:
        return {"norm": g_inp[0].norm()}


class ByHand(SecondOrderBackpropExtension):
    """Works by module extensions only."""

    def __init__(self) -> None:
        super().__init__("by_hand", module_exts={nn.CrossEntropyLoss: Norms(), nn.Linear: Norms()})


class WithFunctions(nn.Module):
    """A function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).sin())


def test_quantities_of_module_extensions_that_are_no_tensor_pass_no_functions() -> None:
    model, loss_fn = extended(WithFunctions().double())
    with pytest.raises(UnsupportedLayer, match="A quantity of module extensions cannot pass"):
        backward(model, loss_fn, X, Y, ByHand())


def test_parameters_that_are_exchanged_between_layers_after_the_forward_pass() -> None:
    """Each has the fields of the layer that has used it."""
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)).double())
    y = torch.tensor([0, 3, 1, 2, 1])
    backward(model, loss_fn, X, y, E.BatchGrad(), E.DiagGGNExact())
    expected = [(model[k].weight.grad_batch, model[k].weight.diag_ggn_exact) for k in (0, 2)]
    loss = loss_fn(model(X), y)
    used = model[0].weight, model[2].weight
    model[2].weight, model[0].weight = used
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss.backward()
    for param, values in zip(used, expected, strict=True):
        torch.testing.assert_close((param.grad_batch, param.diag_ggn_exact), values)


class Convolved(nn.Module):
    """A convolution by a function, with its weight rearranged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(2, 3, 2)), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.conv1d(x.unflatten(1, (2, 4)), self.weight.transpose(0, 1)).flatten(1))


class Attending(nn.Module):
    """Attention by a function, with a mask that depends on a parameter, or dropout."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.first, self.last, self.learned = nn.Linear(4, 8), nn.Linear(8, 3), learned
        self.bias = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x).view(-1, 1, 4, 2)
        mask, dropout = (self.bias, 0.0) if self.learned else (None, 0.5)
        torch.manual_seed(0)
        return self.last(F.scaled_dot_product_attention(q, q.sin(), q, attn_mask=mask, dropout_p=dropout).flatten(1))


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize(
    ("make", "width"),
    [(Convolved, 8), (lambda: Attending(True), 4)],
    ids=["convolution", "attention with a learned mask"],
)
def test_functions_that_no_rule_serves(make: Callable[[], nn.Module], width: int) -> None:
    model = make().double()
    x, y = torch.randn(3, width).double(), torch.tensor([0, 2, 1])
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagGGNExact())
    assert result.ok, result.summary()


@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_functions_with_dropout() -> None:
    model, loss_fn = extended(Attending(False).double())
    backward(model, loss_fn, X, Y, E.BatchGrad())
    torch.testing.assert_close(model.first.weight.grad_batch.sum(0), model.first.weight.grad)


def test_tokens_of_two_losses_can_be_differentiated() -> None:
    """Fields of a longer and of a shorter loss are added up with their graph."""
    model, loss_fn = extended(nn.Linear(4, 3).double())
    other = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(2, 5, 4).double(), torch.randint(3, (2, 5))
    out = model(x)
    with bpk.backpack(E.TokenL2Grad()):
        (loss_fn(out.flatten(0, 1), y.flatten()) + other(out.transpose(1, 2), y)).backward(create_graph=True)
    assert model.weight.token_l2.requires_grad
