"""Weights that several calls use, and the memory of fields and graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from tests.helpers import backward, data, extended, mlp
from tests.references.compare import Assembled, check, rand


class Tied(nn.Module):
    """One weight in two layers, with a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class TiedConvolutions(nn.Module):
    """One kernel in two convolutions of different stride."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 2, 2, padding="same"), nn.Conv1d(2, 2, 2, stride=2)
        self.second.weight = self.first.weight
        self.act, self.flat, self.last = nn.Sigmoid(), nn.Flatten(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.flat(self.second(self.act(self.first(x)))))


def test_tied_weight() -> None:
    check(Tied(), rand(3, 3))


def test_tied_kernel() -> None:
    check(TiedConvolutions(), rand(3, 2, 4))


def test_layer_called_twice_in_a_sequential() -> None:
    layer, act = nn.Linear(3, 3), nn.Sigmoid()
    check(nn.Sequential(layer, act, layer, act, layer), rand(3, 3))


def test_backward_inside_the_extension_hook() -> None:
    """A hook may run models and backward passes of its own; the outer pass goes on undisturbed."""
    model, loss_fn = extended(mlp())
    other, other_loss = extended(mlp(), nn.MSELoss())
    x, y = data()
    found: list[Tensor] = []

    def hook(module: nn.Module) -> None:
        if module is model[-1]:
            with torch.enable_grad():
                other_loss(other(x), x.new_zeros(len(x), 3)).backward()
            found.append(other[0].weight.grad_batch)

    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), extension_hook=hook):
        loss_fn(model(x), y).backward()
    assert len(found) == 1
    torch.testing.assert_close(found[0].sum(0), other[0].weight.grad)
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        assert p.diag_ggn_exact.shape == p.shape


@pytest.mark.processor("arrays of numpy")
def test_memory_of_a_field_that_somebody_holds_is_not_reused() -> None:
    model, loss_fn = extended(mlp())
    x, y = data()

    def step(scale: float) -> None:
        with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact(), E.SqrtGGNExact()):
            (scale * loss_fn(model(x), y)).backward()

    step(1.0)
    held = {
        name: (p.grad_batch, p.diag_ggn_exact_batch[1:], p.sqrt_ggn_exact.numpy())
        for name, p in model.named_parameters()
    }
    copies = {name: [torch.as_tensor(v).clone() for v in kept] for name, kept in held.items()}
    step(3.0)
    step(5.0)
    for name, kept in held.items():
        for value, copy_ in zip(kept, copies[name], strict=True):
            torch.testing.assert_close(torch.as_tensor(value), copy_, rtol=0, atol=0)


def test_cleanup_frees_a_model_whose_products_keep_a_piece_of_graph() -> None:
    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 3)}
    model, loss_fn = extended(Assembled(lambda m, x: m.two(F.gelu(m.one(x))), **layers).double())
    backward(model, loss_fn, rand(3, 3), torch.tensor([0, 1, 2]), E.HMP(), E.GGNMP(), E.PCHMP())
    gone = [weakref.ref(model.one), weakref.ref(model.one.weight)]
    bpk.memory_cleanup(model)
    del model, loss_fn, layers
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_columns_are_overwritten_only_where_nobody_else_looks() -> None:
    """Chains and branches of layers without parameters, joined by functions and by a bilinear layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.one(x)
        left, right = m.tanh(m.sigmoid(h)), m.softplus(m.sigmoid(h))
        return m.two(m.tanh(m.flatten(left + right)) * m.sigmoid(right))

    layers = {"tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(), "softplus": nn.Softplus(), "flatten": nn.Flatten()}
    check(Assembled(forward, one=nn.Linear(3, 4), two=nn.Linear(4, 3), **layers), rand(3, 3))
