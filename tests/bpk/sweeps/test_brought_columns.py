"""A single column of a loss is brought to all calls by autograd, where it is small: the same as rules would carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.sweeps.columns import brought

N, T, D = 4, 3, 6
QUANTITIES = {
    "diagonal": lambda: E.DiagGGNMC(),
    "of samples": lambda: E.BatchDiagGGNMC(),
    "root": lambda: E.SqrtGGNMC(),
    "factors": lambda: E.KFAC(),
    "expanded factors": lambda: E.KFAC(approximation="expand"),
}


class Block(nn.Module):
    """Attention as a layer, beside the identity; a position embedding, and a table that functions compute."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.norm, self.last = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.position, self.scale = nn.Parameter(torch.rand(T, D)), nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x) + self.position
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return self.last((x * self.scale.tanh()).mean(1))


class Tied(nn.Module):
    """One layer twice, and time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.transpose(0, 1)).tanh()
        return self.last(self.first(h).relu().sum(0))


class Direct(nn.Module):
    """Functions of parameters between the last layer and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(D, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1)) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {"block": Block, "tied": Tied, "direct": Direct}


def fields(model: nn.Module, x: Tensor, extension: BackpropExtension, **options: Any) -> dict[str, list[Tensor]]:
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    torch.manual_seed(1)
    with bpk.backpack(extension, **options):
        loss_fn(model(x), torch.arange(len(x)) % 3).backward()
    found = {name: getattr(p, extension.savefield) for name, p in model.named_parameters()}
    return {name: value if isinstance(value, list) else [value] for name, value in found.items()}


class Counted:
    """How often autograd has brought a column."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, begin = 0, brought.Brought.begin

        def counting(*args: object) -> brought.Brought | None:
            found = begin(*args)  # type: ignore[arg-type]
            self.count += found is not None
            return found

        monkeypatch.setattr(brought.Brought, "begin", counting)


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return bpk.extend(MODELS[name]().double()), torch.rand(N, T, D, dtype=torch.float64)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_the_same_as_by_rules(name: str, quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(name)
    counted = Counted(monkeypatch)
    monkeypatch.setattr(brought, "FEW_CALLS", 0)
    found = fields(model, x, QUANTITIES[quantity]())
    assert counted.count == 1
    monkeypatch.setattr(brought, "FEW_CALLS", 1 << 20)
    by_rules = fields(model, x, QUANTITIES[quantity]())
    assert counted.count == 1
    for key, values in by_rules.items():
        for value, other in zip(values, found[key], strict=True):
            torch.testing.assert_close(other, value)


class Checkpointed(nn.Module):
    """A layer that is computed once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x.mean(1), use_reentrant=False)
        return self.last(h.relu())


class Steps(nn.Module):
    """A recurrent layer, whose rule pulls columns through all steps once for inputs and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.RNN(D, D, batch_first=True), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[0][:, -1])


class Within(nn.Module):
    """What one layer reads is computed from parameters, and another one reads a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.mean(1) * self.scale
        return self.last(self.first(scaled) * self.second(scaled.sin()))


class Given(nn.Module):
    """A layer reads a parameter as it is, and others, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(D, 3), nn.Parameter(torch.rand(N, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table) + self.layer(self.table * x.mean(1))


OTHERS: dict[str, tuple[type[nn.Module], Callable[[], BackpropExtension], dict[str, Any]]] = {
    "several columns": (Tied, lambda: E.DiagGGNMC(mc_samples=2), {}),
    "some samples": (Tied, lambda: E.DiagGGNMC(subsampling=[1, 2]), {}),
    "no memory": (Tied, E.DiagGGNMC, {"memory": 1}),
    "computed again": (Checkpointed, E.DiagGGNMC, {}),
    "steps": (Steps, E.DiagGGNMC, {}),
    "signs": (Tied, E.DiagHessian, {}),
    "a function within another one": (Within, E.DiagGGNMC, {}),
    "a parameter that a layer is given": (Given, E.DiagGGNMC, {}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:.*memory")
def test_rules_carry_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, extension, options = OTHERS[name]
    monkeypatch.setattr(brought, "FEW_CALLS", 0)
    counted = Counted(monkeypatch)
    fields(bpk.extend(build()), torch.rand(N, T, D), extension(), **options)
    assert not counted.count


@pytest.mark.filterwarnings("ignore:.*half precision")
def test_rules_carry_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brought, "FEW_CALLS", 0)
    counted = Counted(monkeypatch)
    fields(bpk.extend(Tied().bfloat16()), torch.rand(N, T, D).bfloat16(), E.DiagGGNMC())
    assert not counted.count


def test_of_several_losses_input_factors_count_once() -> None:
    """One loss has a single column, which autograd may bring to products inside of a layer, and the other has many."""
    torch.manual_seed(0)
    model, x = bpk.extend(Block().double()), torch.randn(N, T, D, dtype=torch.float64)
    classes, values = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())

    def factors(with_values: bool) -> dict[str, list[Tensor]]:
        logits = model(x)
        objective = classes(logits[:, :2], torch.zeros(N, dtype=torch.long))
        if with_values:
            objective = 0.3 * values(logits[:, 2], x[:, 0, 0]) + objective
        with bpk.backpack(E.KFLR()):
            objective.backward()
        return {name: p.kflr for name, p in model.named_parameters()}  # type: ignore[attr-defined]

    alone, both = factors(False), factors(True)
    for name, found in both.items():
        for left, right in zip(alone[name][1:], found[1:], strict=True):
            torch.testing.assert_close(left, right, msg=f"A of {name}")
