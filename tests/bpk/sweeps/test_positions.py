"""Columns of a loss over positions keep to their position through position-wise layers, and are written out behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.plan.step import Step
from bpk.sweeps.columns.lazy import StartingColumns
from bpk.sweeps.starts.positions import ByPosition
from tests.helpers import backward

VOCABULARY, N, T = 7, 3, 5


class Words(nn.Module):
    """Predictions `[N, T, V]`, handed to the loss in one of three forms; `mixed` has a recurrent layer."""

    def __init__(self, form: str, mixed: bool) -> None:
        super().__init__()
        self.form = form
        self.table = nn.Embedding(VOCABULARY, 4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True) if mixed else None
        self.norm, self.wide, self.head = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, VOCABULARY)
        self.act = nn.GELU()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x if self.recurrent is None else self.recurrent(x)[0]
        x = self.head(self.act(self.wide(self.norm(x))))
        if self.form == "extra axis":
            return x.transpose(1, 2)
        return (x.transpose(0, 1) if self.form == "time first" else x).flatten(0, 1)

    def targets(self) -> Tensor:
        y = torch.randint(VOCABULARY, (N, T))
        if self.form == "extra axis":
            return y
        return (y.T if self.form == "time first" else y).flatten()


@pytest.fixture
def trail(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """In front of which calls columns keep to their positions."""
    found: list[tuple[str, bool]] = []
    original = ByPosition.send_positions

    def spy(self: ByPosition, step: Step, *details: Any) -> list[StartingColumns]:
        written_out = original(self, step, *details)
        found.append((step.record.path, not written_out))
        return written_out

    monkeypatch.setattr(ByPosition, "send_positions", spy)
    return found


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("form", ["rows", "time first", "extra axis"])
def test_diagonals(form: str, mixed: bool, chunk: int | None, trail: list[tuple[str, bool]]) -> None:
    torch.manual_seed(0)
    model = Words(form, mixed).double()
    loss_fn, tokens, y = nn.CrossEntropyLoss(), torch.randint(VOCABULARY, (N, T)), model.targets()
    bpk.extend(model), bpk.extend(loss_fn)
    backward(model, loss_fn, tokens, y, E.DiagGGNExact(), E.BatchDiagGGNExact())  # together: columns are written out
    expected = {name: p.diag_ggn_exact.clone() for name, p in model.named_parameters()}
    assert not trail
    with bpk.backpack(E.DiagGGNExact(), chunk_size=chunk):
        loss_fn(model(tokens), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact, expected[name], rtol=1e-9, atol=1e-14)
    kept = {path for path, keeps in trail if keeps}
    assert {"CrossEntropyLoss", "head", "act", "wide"} <= kept
    assert ("norm" in kept) is not mixed  # a table keeps positions apart, a recurrent layer does not


def test_reused_parameters_are_written_out(trail: list[tuple[str, bool]]) -> None:
    """Contributions of several uses must be added before they are squared."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(tokens))).flatten(0, 1)

    tokens, y = torch.randint(VOCABULARY, (N, T)), torch.randint(VOCABULARY, (N * T,))
    assert bpk.verify(Tied(), nn.CrossEntropyLoss(), tokens, y, E.DiagGGNExact())
    assert trail and not any(keeps for _, keeps in trail)


def test_pixels(trail: list[tuple[str, bool]]) -> None:
    """Convolutions mix pixels: columns are written out before them."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 1))
    x, y = torch.randn(2, 1, 4, 3), torch.randint(3, (2, 4, 3))
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact())
    assert trail == [("CrossEntropyLoss", False)]


def test_a_parameter_with_two_names(trail: list[tuple[str, bool]]) -> None:
    """What comes to both is added before it is squared."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.norm.bias = self.norm.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).transpose(1, 2)

    x, y = torch.randn(N, T, 4), torch.randint(4, (N, T))
    assert bpk.verify(Norm(), nn.CrossEntropyLoss(), x, y, E.DiagGGNExact())
    assert all(keeps for _, keeps in trail)


def test_a_frozen_first_layer_whose_input_has_a_gradient() -> None:
    """Columns that keep to their positions end there, where nothing waits for them: it was taken for a lost layer."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[0].requires_grad_(False)
    x, y, loss_fn = torch.randn(N, T, 4).double().requires_grad_(), torch.randint(3, (N, T)), nn.CrossEntropyLoss()
    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(E.DiagGGNExact(), E.DiagHessian()):
        loss_fn(model(x).transpose(1, 2), y).backward()
    torch.testing.assert_close(model[2].weight.diag_ggn_exact, model[2].weight.diag_h)
