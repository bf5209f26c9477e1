"""Parameters that functions spread over samples: rows that are read off side by side are those of row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk.extensions import GGNMP, HMP, PCHMP, BatchDiagGGNExact, BatchGrad, BatchL2Grad, SqrtGGNExact
from bpk.plan import broadcast as spread
from bpk.sweeps import functions

N, T, D = 18, 3, 4
"""More samples than one power of two for each: numbers 0 and 16 differ in the second digit alone."""


class Spreads(nn.Module):
    """A parameter, a function of it and of `[N, T, D]`, a layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.spread = nn.Parameter(torch.randn(shape))
        self.function = function
        self.last = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.spread)).sum(1)


def far(x: Tensor) -> Tensor:
    """Every row, and a share of the one that is 16 rows away."""
    return x - 0.5 * x.roll(16, 0)


SIDE_BY_SIDE = {
    "positions": (lambda x, p: x + p, (1, T, D)),
    "bias": (lambda x, p: (p + x).tanh(), (D,)),
    "difference": (lambda x, p: torch.sub(x, p, alpha=2) - 3 * x, (T, D)),
    "token": (lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), (1, 1, D)),
    "twice": (lambda x, p: (x + p) * p, (D,)),
    "scalar": (lambda x, p: p * x, ()),
    "scale": (lambda x, p: x + x.sin() * p, (D,)),
    "time first": (lambda x, p: (x.transpose(0, 1) + p).transpose(0, 1), (T, 1, D)),
    "square": (lambda x, p: x + p.square(), (D,)),
    "both": (lambda x, p: (x + p) * p.exp(), (D,)),
    "weight of a normalisation": (lambda x, p: F.layer_norm(x, (D,), 1 + p).tanh(), (D,)),
    "bias of a normalisation": (lambda x, p: F.layer_norm(x, (D,), None, 2 * p) * x, (D,)),
    "both of a normalisation": (lambda x, p: F.layer_norm(x.mT, (T,), p.exp(), p).mT, (T,)),
    "one more": (lambda x, p: x.tanh() * (1 + p), (D,)),
    "channels": (lambda x, p: (x.mT.square() * p[:, None]).mT, (D,)),
    "in parts": (lambda x, p: x * p.chunk(2)[0] - x.sin() * p.chunk(2)[1].exp(), (2 * D,)),
    "a function of a function": (lambda x, p: x * (1 + p) - x.sin() * (1 + p).square(), (D,)),
}
OF_A_NORMALISATION = ("weight of a normalisation", "bias of a normalisation")
BY_AUTOGRAD = (
    "positions",
    "bias",
    "difference",
    "token",
    "twice",
    "scalar",
    "scale",
    "square",
    "both",
    "one more",
    "in parts",
    "a function of a function",
    *OF_A_NORMALISATION,
)
"""Where autograd brings them itself: rows stay along axis 0 all the way."""
ROW_BY_ROW = {
    "backwards": (lambda x, p: (x + p).flip(0), (T, D)),
    "one row further": (lambda x, p: x + p - (x + p).roll(1, 0), (T, D)),
    "16 rows further": (lambda x, p: far(x * p), (D,)),
    "quotient": (lambda x, p: x / p, (D,)),
    "product with a scaled row": (lambda x, p: x * p - (x * p).roll(1, 0) * p, (D,)),
    "mean": (lambda x, p: (x + p) - (x * p).mean(0), (D,)),
    "its own batch axis": (lambda x, p: x + p, (N, 1, D)),
    "half of the rows": (lambda x, p: torch.cat([x[: N // 2] + p, x[N // 2 :]]), (D,)),
}


WITH_SUMS = {
    "in parts": (lambda x, p: x * p.chunk(2)[0] + x.sin() * p.chunk(2)[1].exp(), (2 * D,)),
    "a function of a function": (lambda x, p: x * (1 + p) + x.sin() * (1 + p).square(), (D,)),
    "one row further": (lambda x, p: x + p + (x + p).roll(1, 0), (T, D)),
    "16 rows further": (lambda x, p: x * p + 0.5 * (x * p).roll(16, 0), (D,)),
    "product with a scaled row": (lambda x, p: x * p + (x * p).roll(1, 0) * p, (D,)),
}
"""The same with sums, which are calls: functions of a parameter stand before each of their terms."""

EXPECT = functions.BroadcastParameters.expect


def rows(model: nn.Module, x: Tensor) -> Tensor:
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(BatchGrad()):
        loss_fn(bpk.extend(model)(x), torch.arange(len(x)) % 3).backward()
    return model.spread.grad_batch  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WITH_SUMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_before_the_terms_of_a_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Spreads(*WITH_SUMS[name]).double()  # type: ignore[arg-type]
    x, brought = torch.randn(N, T, D, dtype=torch.float64), list[bool]()

    def expect(*given: Any) -> bool:
        brought.append(EXPECT(*given))
        return brought[-1]

    monkeypatch.setattr(functions.BroadcastParameters, "expect", expect)
    found = rows(model, x)
    assert brought == [name in BY_AUTOGRAD] * 2
    monkeypatch.setattr(functions.SpreadPlaces, "along_rows", lambda *given: {})
    monkeypatch.setattr(spread.BroadcastRows, "rows", lambda *given: {})
    torch.testing.assert_close(found, rows(model, x))


@pytest.mark.parametrize("name", [*SIDE_BY_SIDE, *ROW_BY_ROW])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_are_those_of_row_by_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Spreads(*(SIDE_BY_SIDE | ROW_BY_ROW)[name]).double()  # type: ignore[arg-type]
    x = torch.randn(N, T, D, dtype=torch.float64)
    taken: list[int] = []
    columns = spread.BroadcastRows.rows

    def spy(*given: Any) -> dict[int, Any]:
        taken.append(len(found := columns(*given)))
        return found

    brought: list[bool] = []

    def expect(*given: Any) -> bool:
        brought.append(EXPECT(*given))
        return brought[-1]

    monkeypatch.setattr(spread.BroadcastRows, "rows", spy)
    monkeypatch.setattr(functions.BroadcastParameters, "expect", expect)
    found = rows(model, x)
    assert brought == [name in BY_AUTOGRAD]
    assert taken == ([] if name in BY_AUTOGRAD else [int(name in SIDE_BY_SIDE)])
    monkeypatch.setattr(functions.SpreadPlaces, "along_rows", lambda *given: {})
    monkeypatch.setattr(spread.BroadcastRows, "rows", lambda *given: {})
    torch.testing.assert_close(found, rows(model, x))
    if name in SIDE_BY_SIDE:
        for n in range(N):
            loss = nn.functional.cross_entropy(model(x[n : n + 1]), torch.tensor([n % 3])) / N
            torch.testing.assert_close(found[n], torch.autograd.grad(loss, model.spread)[0])


class Residual(nn.Module):
    """Positions are added once; two branches and what follows read the sum."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.branches = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
        self.spread = nn.Parameter(torch.randn(1, T, D))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.spread
        for branch in self.branches:
            x = x + branch(self.mix(x)).relu()
        return self.last(x).sum(1)


@pytest.mark.parametrize("mix", [torch.Tensor.tanh, lambda x: x.flip(1)], ids=["as they are", "one reader moves them"])
@pytest.mark.parametrize("subsampling", [None, [4, 0]])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_several_readers_of_one_sum(mix: Callable[[Tensor], Tensor], subsampling: list[int] | None) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Residual(mix).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, T, D, dtype=torch.float64), torch.arange(5) % 3
    with bpk.backpack(BatchGrad(subsampling)):
        loss_fn(model(x), y).backward()
    for row, n in zip(model.spread.grad_batch, subsampling or range(5), strict=True):
        loss = nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / 5
        torch.testing.assert_close(row, torch.autograd.grad(loss, model.spread)[0])


MIXING = ("one row further", "16 rows further", "product with a scaled row", "mean")
"""Refused in second order."""


@pytest.mark.parametrize("name", [name for name in (*SIDE_BY_SIDE, *ROW_BY_ROW) if name not in MIXING])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_columns_are_those_of_row_by_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second order: as many columns as the prediction has entries."""
    torch.manual_seed(0)
    model = bpk.extend(Spreads(*(SIDE_BY_SIDE | ROW_BY_ROW)[name]).double())  # type: ignore[arg-type]
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(N, T, D, dtype=torch.float64), torch.arange(N) % 3
    found = []
    for _ in range(2):
        with bpk.backpack(BatchDiagGGNExact(), SqrtGGNExact()):
            loss_fn(model(x), y).backward()
        found.append((model.spread.diag_ggn_exact_batch, model.spread.sqrt_ggn_exact))
        monkeypatch.setattr(spread.BroadcastRows, "rows", lambda *given: {})
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_hooks_keep_is_not_read() -> None:
    """A checkpoint hands out a tensor once."""
    torch.manual_seed(0)
    plain, x = Spreads(lambda x, p: x.tanh() * p, (D,)).double(), torch.randn(N, T, D, dtype=torch.float64)
    again = Spreads(lambda x, p: checkpoint(lambda x: x.tanh() * p, x, use_reentrant=False), (D,)).double()
    again.load_state_dict(plain.state_dict())
    torch.testing.assert_close(rows(again, x), rows(plain, x))
    torch.testing.assert_close(again.spread.grad, plain.spread.grad)


class Slices(nn.Module):
    """A network whose weights are pieces of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(D * 3 + 3 * 3))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.flat.split([D * 3, 3 * 3])
        return F.linear(F.linear(x, first.view(3, D)).tanh(), last.view(3, 3))


@pytest.mark.parametrize("other", [GGNMP, HMP, PCHMP, lambda: BatchGrad(subsampling=[2, 0])])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantities_that_are_final_at_once_and_others(other: Callable[[], Any]) -> None:
    """Norms are final before products, or chosen rows, of the same parameter have been noted: this was an error."""
    torch.manual_seed(0)
    model, loss_fn, made = bpk.extend(Slices().double()), bpk.extend(nn.CrossEntropyLoss()), other()
    x, y, v, found = torch.randn(N, D, dtype=torch.float64), torch.arange(N) % 3, torch.randn(D * 3 + 3 * 3), []
    for extensions in ([BatchL2Grad(), made], [made, BatchL2Grad()], [BatchL2Grad()], [made]):
        model.flat.batch_l2 = None  # type: ignore[assignment]
        with bpk.backpack(*extensions):
            loss_fn(model(x), y).backward()
        value = getattr(model.flat, made.savefield, None)
        found.append((model.flat.batch_l2, value(v.double()) if callable(value) else value))
    (norms, first), (again, second), (alone, _), (_, last) = found
    torch.testing.assert_close((norms, first, second), (alone, last, last))
    torch.testing.assert_close(norms, again)
