"""Models and steps that a compiler runs, `torch.compile` or TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.helpers import data, extended, mlp, saved, told


# ---- torch.compile -------------------------------------------------------------------------------------
@pytest.fixture
def compiler() -> Iterator[Any]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.compile(backend="eager")
    torch._dynamo.reset()


def test_a_compiled_step(compiler: Any) -> None:
    model, loss_fn = extended()

    @compiler
    def step(x: Tensor, y: Tensor) -> None:
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x), y).backward()

    with told(RuntimeError, r"torch\.compile has compiled"):
        step(*data())


def test_compiled_autograd(compiler: Any) -> None:
    from torch._dynamo import compiled_autograd

    model, loss_fn = extended()
    x, y = data()
    with told(RuntimeError, "compiled autograd"), bpk.backpack(E.BatchGrad()):
        loss = loss_fn(model(x), y)
        with compiled_autograd._enable(compiler):
            loss.backward()
    assert saved(model) == set()


def test_a_compiled_backward_pass(compiler: Any) -> None:
    model, loss_fn = extended()
    x, y = data()

    @compiler
    def step(x: Tensor, y: Tensor) -> None:
        loss_fn(model(x), y).backward()

    refused = told(RuntimeError, r"in a function that torch\.compile has compiled(?s:.*)compile the model only")
    with refused, bpk.backpack(E.BatchGrad()):
        step(x, y)
    assert saved(model) == set()


def test_a_compiled_model(compiler: Any) -> None:
    """Hooks run as they are, and the compiler has nothing to say of them."""
    model, loss_fn = extended()
    x, y = data()
    fast = torch.compile(model, backend="eager")
    warnings.filterwarnings("error", message="Dynamo does not know")
    with bpk.backpack(E.BatchGrad()):
        loss_fn(fast(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_with_parameters_of_its_own(compiler: Any, in_place: bool) -> None:
    """Its passage is written down outside of what is compiled, which cannot trace it."""
    model, loss_fn = extended(Scaled().double())
    x, y = data()
    if in_place:
        model.compile(backend="eager")
    fast = model if in_place else torch.compile(model, backend="eager")
    for _ in range(2):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(fast(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad / 2)


class Scaled(nn.Module):
    """A layer, and a parameter that belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.rand(3) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


# ---- TorchScript ---------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules() -> None:
    for model in (torch.jit.script(mlp()), nn.Sequential(torch.jit.script(nn.Linear(4, 3)), nn.ReLU())):
        with told(ValueError, "torch.jit", "nobody sees their calls"):
            bpk.extend(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_scripted_functions_inside_of_a_model() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.tanh(x @ w) * x

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.product, self.head = torch.jit.script(Product()), nn.Linear(4, 3)
            self.backbone = torch.jit.trace(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.backbone(self.product(x, self.w)))

    quantities = E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR()
    result = bpk.verify(Scripted(), nn.CrossEntropyLoss(), *data(), *quantities, raise_on_error=True)
    assert len(result.rows) == 12
