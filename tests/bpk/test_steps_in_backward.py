"""A step of the optimiser within the backward pass: as soon as a gradient is there, its parameter changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from tests.bpk.test_users_hooks import same

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class Attends(nn.Module):
    """Attention to data: weights and biases inside get their gradients one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0].flatten(1))


class Remembers(nn.Module):
    """A recurrent layer, and a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(4, 3, batch_first=True), nn.GRUCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.lstm(x)[0][:, -1])


class Ties(nn.Module):
    """Weights that layers and functions use several times."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.inner(self.words(x.mean(1)))) * self.scale
        return self.norm(self.inner(z)) @ self.words.weight.T


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attends,
    "transformer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(12, 4)
    ),
    "recurrent": Remembers,
    "tied": Ties,
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 5), nn.Linear(5, 4)),
}
QUANTITIES = [E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance, E.DiagGGNExact, E.DiagHessian, E.KFAC]


@pytest.mark.parametrize("extension", QUANTITIES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_fields_are_those_of_the_parameters_before(name: str, extension: type[BackpropExtension]) -> None:
    torch.manual_seed(0)
    start, x, y = MODELS[name]().double(), torch.randn(5, 3, 4).double(), torch.arange(5) % 4
    before = [p.detach().clone() for p in start.parameters()]

    def fields(steps: bool) -> list[object]:
        model, loss_fn = bpk.extend(copy.deepcopy(start)), bpk.extend(nn.CrossEntropyLoss())
        optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for p in model.parameters() if steps else ():
            p.register_post_accumulate_grad_hook(step)
        torch.manual_seed(1)  # of what KFAC draws
        with bpk.backpack(extension()):
            loss_fn(model(x), y).backward()
        assert all((p.grad is None) == steps for p in model.parameters())
        assert steps != all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        return [getattr(p, extension().savefield) for p in model.parameters()]

    same(fields(steps=True), fields(steps=False))


@pytest.mark.parametrize("name", MODELS)
def test_sums_that_need_all_norms(name: str) -> None:
    """Clipped sums are made at the end: right, or refused where a rule would read a parameter that was changed."""
    torch.manual_seed(0)
    start, x, y = MODELS[name]().double(), torch.randn(5, 3, 4).double(), torch.arange(5) % 4
    found: list[list[Tensor]] = []
    for steps in (False, True):
        model, loss_fn = bpk.extend(copy.deepcopy(start)), bpk.extend(nn.CrossEntropyLoss())
        for p in model.parameters() if steps else ():
            p.register_post_accumulate_grad_hook(torch.no_grad()(lambda p: p.sub_(p.grad)))
        with bpk.backpack(E.ClippedGrad(0.1)):
            loss = loss_fn(model(x), y)
            if steps and name == "recurrent":
                with pytest.raises(RuntimeError, match=r"'weight_\w*' of the layer with .* was changed after"):
                    loss.backward()
                return
            loss.backward()
        found.append([p.clipped_grad for p in model.parameters()])
    same(found[1], found[0])


@pytest.mark.parametrize("extension", QUANTITIES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("name", ["attention", "recurrent", "linear"])
def test_fields_are_there_in_the_hook(name: str, extension: type[BackpropExtension]) -> None:
    """Those of parameters that layers alone use."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(MODELS[name]().double()), bpk.extend(nn.CrossEntropyLoss())
    seen: dict[Tensor, object] = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.update({p: getattr(p, extension().savefield)}))
    with bpk.backpack(extension()):
        loss_fn(model(torch.randn(5, 3, 4).double()), torch.arange(5) % 4).backward()
    assert [seen[p] is getattr(p, extension().savefield) for p in model.parameters()] == [True] * len(seen)
