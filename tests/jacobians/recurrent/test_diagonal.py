"""The residual's diagonal in the parameters of recurrent layers: by matrices over time and by tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from bpk import extensions as E
from bpk.jacobians.core.call import Call
from bpk.jacobians.recurrent import diagonal
from bpk.jacobians.recurrent.diagonal import Diagonals
from bpk.jacobians.recurrent.recurrent import Recurrent
from bpk.rules import REGISTRY
from tests.references.hessian_diagonals import of_loss

F64 = torch.float64
N, T, D, H = 2, 4, 2, 3
BY_MATRICES = diagonal.by_matrices

LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.RNN(D, H, batch_first=True),
    lambda: nn.RNN(D, H, num_layers=2, nonlinearity="relu", bias=False, batch_first=True),
    lambda: nn.GRU(D, H, num_layers=3, batch_first=True),
    lambda: nn.GRU(D, H, num_layers=2, bidirectional=True, batch_first=True),
    lambda: nn.LSTM(D, H, num_layers=2, bias=False, batch_first=True),
    lambda: nn.LSTM(D, H, num_layers=2, proj_size=2, batch_first=True),
    lambda: nn.LSTM(D, H, bidirectional=True, batch_first=True),
]


def call_of(layer: Any, x: Tensor, used: Sequence[int] = (0,)) -> tuple[Recurrent, Call, Tensor]:
    rule = REGISTRY.find(type(layer))
    assert isinstance(rule, Recurrent)
    call = Call.of(layer, x, params=rule.params_of(layer), rule=rule, used=used)
    return rule, call, torch.randn_like(call.output)


def diagonals(rule: Recurrent, call: Call, grad: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [rule.residual_squares(call, grad, name) for name in call.params]


@pytest.fixture
def lowest_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Matrices over time wherever they can be; the layers for whose parameters they were made."""
    asked: list[int] = []

    def noted(stack: Any, lowest: int, row: Any) -> dict[str, Tensor]:
        asked.append(lowest)
        return BY_MATRICES(stack, lowest, row)

    monkeypatch.setattr(diagonal, "pays", lambda row: True)
    monkeypatch.setattr(diagonal, "by_matrices", noted)
    return asked


@pytest.mark.parametrize("limit", [1, 1 << 24], ids=["one sample at a time", "all samples"])
@pytest.mark.parametrize("make", LAYERS, ids=[str(make()) for make in LAYERS])
def test_diagonal_is_that_of_autograd(
    make: Callable[[], nn.Module], limit: int, lowest_of: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(diagonal, "LIMIT", limit)
    layer: Any = make().double()
    x = torch.randn(N, T, D, dtype=F64)
    for used in ((0,), (0, 1)):
        rule, call, grad = call_of(layer, x, used)
        found = diagonals(rule, call, grad)
        parts = rule.split(call, grad, 1)
        for n in range(N):
            out, states = layer(x[n : n + 1])
            loss = (out * parts[0][n]).sum()
            if 1 in parts:
                last = states[0] if isinstance(states, tuple) else states
                loss = loss + (last.transpose(0, 1) * parts[1][n]).sum()
            torch.testing.assert_close([x[n] for x in found], of_loss(layer, loss))
    ways, depth = 1 + layer.bidirectional, layer.num_layers
    one_recurrence = depth if ways == 1 else 1  # of two directions, matrices over time see the upper layer alone
    assert len(lowest_of) == 2 * ways * one_recurrence, "once for all parameters of a scan"


@pytest.mark.parametrize("make", LAYERS, ids=[str(make()) for make in LAYERS])
def test_tangents_give_the_same(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rule, call, grad = call_of(make().double(), torch.randn(N, T, D, dtype=F64))
    monkeypatch.setattr(diagonal, "LIMIT", 1000)
    found = []
    for way in (True, False):
        monkeypatch.setattr(diagonal, "pays", lambda row, way=way: way)
        found.append(diagonals(rule, call, grad.clone()))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("limit", [1, 1 << 24], ids=["one sample at a time", "all samples"])
@pytest.mark.parametrize("make", LAYERS, ids=[str(make()) for make in LAYERS])
def test_columns_of_the_input(make: Callable[[], nn.Module], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products add up to the second derivative in the input, jointly over all steps."""
    torch.manual_seed(0)
    monkeypatch.setattr(diagonal, "LIMIT", limit)
    layer: Any = make().double()
    x = torch.randn(N, T, D, dtype=F64)
    rule, call, grad = call_of(layer, x)
    with torch.no_grad():
        columns, signs = rule.signed_columns(call, grad)
        dense = rule.diagonals(call, grad).of_input()
    assert (dense is None) == (layer.bidirectional and layer.num_layers > 1)
    flat = columns[0].flatten(2)
    found = torch.einsum("kn,kni,knj->nij", signs, flat, flat)
    for n in range(N):

        def contracted(one: Tensor, n: int = n) -> Tensor:
            return (layer(one)[0] * grad[n]).sum()

        expected: Any = torch.autograd.functional.hessian(contracted, x[n : n + 1])
        torch.testing.assert_close(found[n], expected.reshape(T * D, T * D))


class Tagger(nn.Module):
    """A prediction for every step, of a network with dropout that has initial states and reads some of them twice."""

    def __init__(self, make: Any, twice: bool) -> None:
        super().__init__()
        self.layer, self.last, self.twice = (
            make(2, 2, num_layers=3, dropout=0.0 if twice else 0.4),
            nn.Linear(2, 3),
            twice,
        )

    def forward(self, x: Tensor) -> Tensor:
        h, states = self.layer(x.transpose(0, 1))
        h = self.layer(h, states)[0] if self.twice else h
        return self.last(h).permute(1, 2, 0)


@pytest.mark.parametrize("twice", [False, True], ids=["dropout", "used twice"])
@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_whole_networks(make: Any, twice: bool, lowest_of: list[int]) -> None:
    """Masks of dropout between the layers, weights that two calls share, and some of the samples alone."""
    torch.manual_seed(0)
    model = bpk.extend(Tagger(make, twice).double())
    model.layer.weight_hh_l1.requires_grad_(False)
    x, y = torch.randn(3, T, 2, dtype=F64), torch.randint(3, (3, T))
    loss_fn, chosen = bpk.extend(nn.CrossEntropyLoss()), [0, 2]
    with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian(subsampling=chosen)):
        out = model(x)
        loss_fn(out, y).backward(retain_graph=True)
    terms = cross_entropy(out, y, reduction="none").sum(1) / y.numel()
    alive = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
    each = [of_loss(alive, term) for term in terms]
    for k, p in enumerate(alive):
        rows: Any = torch.stack([diagonals[k] for diagonals in each])
        torch.testing.assert_close(p.diag_h, rows.sum(0))
        torch.testing.assert_close(p.diag_h_batch, rows[chosen])
    assert set(lowest_of) == {0, 1, 2}


def test_single_precision() -> None:
    torch.manual_seed(0)
    layer, x = nn.GRU(8, 16, batch_first=True), torch.randn(2, 20, 8)
    rule, call, grad = call_of(layer, x)
    found = diagonals(rule, call, grad)
    expected = diagonals(rule, call.cast(F64), grad.double())
    for got, target in zip(found, expected, strict=True):
        assert (got - target).abs().max() < 1e-5 * target.abs().max()


def test_very_long_sequences_take_tangents() -> None:
    """Matrices over time grow with the square of its steps."""
    torch.manual_seed(0)
    for steps, pays in ((20, True), (500, False)):
        rule, call, grad = call_of(nn.GRU(1, 2, batch_first=True).double(), torch.randn(1, steps, 1, dtype=F64))
        with torch.no_grad():
            found = Diagonals(rule.at(call), rule.seeds(rule.split(call, grad[None])))
            assert diagonal.pays(found.points[0]) is pays
            found.of("bias_hh_l0")
        assert bool(found.known) is pays
