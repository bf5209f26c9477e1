"""Squares and norms of weights that functions compute: rows exist for some samples or columns at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.profiler import profile

import bpk
from bpk import extensions as E
from bpk.plan import by_output, spread_rows
from bpk.plan.by_output import OutputSquares
from bpk.plan.stretch_call import StretchCall
from tests.helpers import backward
from tests.references.compare import rand

N, WIDTH = 12, 60


def normalised() -> nn.Sequential:
    linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(linear, nn.ReLU(), parametrizations.weight_norm(nn.Linear(WIDTH, 4)))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, WIDTH), torch.arange(N) % 4


def largest(model: nn.Module, extension: E.BackpropExtension) -> int:
    """How many numbers the largest tensor has that a pass makes."""
    x, y = data()
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with profile(profile_memory=True) as seen:
        backward(bpk.extend(model), loss_fn, x, y, extension)
    return max(event.nbytes() for event in seen.profiler.kineto_results.events() if event.nbytes() > 0) // 4


@pytest.mark.parametrize("extension", [E.BatchL2Grad, E.SumGradSquared, E.Variance, E.DiagGGNExact, E.DiagGGNMC])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_do_not_exist_all_at_once(extension: type[E.BackpropExtension], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = normalised()
    monkeypatch.setattr(spread_rows, "PIECE", 2 * WIDTH**2)
    assert largest(model, extension()) <= 3 * WIDTH**2
    monkeypatch.setattr(spread_rows, "PIECE", 1 << 30)
    assert largest(model, extension()) >= N * WIDTH**2


@pytest.mark.parametrize("extension", [E.BatchL2Grad, E.SumGradSquared, E.DiagGGNExact])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_parameters_of_a_stretch_are_served_at_once(
    extension: type[E.BackpropExtension], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[StretchCall] = []
    squares = StretchCall.squares_of_all

    def spy(self: StretchCall, *given: object) -> dict[str, Tensor]:
        calls.append(self)
        return squares(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StretchCall, "squares_of_all", spy)
    x, y = data()
    backward(bpk.extend(normalised()), bpk.extend(nn.CrossEntropyLoss()), x, y, extension())
    assert len(set(map(id, calls))) == len(calls) >= 2, "none is asked twice"


class Tied(nn.Module):
    """A computed weight that two layers share, and one of them with its vector."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.rand(5, 1) + 0.5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return self.last(nn.functional.linear(nn.functional.linear(x, w).tanh(), w).sin() * self.g[:, 0])


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("piece", [1, 1 << 19])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tied_weights_and_several_losses(losses: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(spread_rows, "PIECE", piece)
    model, x, y = bpk.extend(Tied().double()), rand(6, 5), torch.arange(6) % 3
    loss_fns = [bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())][:losses]
    others = [y, rand(6, 3)]
    ours = [E.BatchL2Grad(), E.SumGradSquared(), E.Variance(), E.DiagGGNExact(), E.BatchDiagGGNExact()]
    with bpk.backpack(*ours):
        out = model(x)
        sum(f(out, t) for f, t in zip(loss_fns, others, strict=False)).backward()  # type: ignore[union-attr]
    for p in model.parameters():
        rows = []
        for n in range(6):
            one = model(x[n : n + 1])
            loss = nn.functional.cross_entropy(one, y[n : n + 1]) / 6
            if losses > 1:
                loss = loss + nn.functional.mse_loss(one, others[1][n : n + 1]) / 6
            rows.append(torch.autograd.grad(loss, p)[0])
        grads = torch.stack(rows)
        torch.testing.assert_close(p.batch_l2, grads.flatten(1).square().sum(1))
        torch.testing.assert_close(p.sum_grad_squared, grads.square().sum(0))
        torch.testing.assert_close(p.variance, grads.var(0, unbiased=False))
        torch.testing.assert_close(p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_columns_that_come_some_at_a_time() -> None:
    torch.manual_seed(0)
    model, x, y = bpk.extend(normalised().double()), rand(N, WIDTH), torch.arange(N) % 4
    found = []
    for options in ({}, {"chunk_size": 1}, {"memory": 1 << 14}):
        with bpk.backpack(E.DiagGGNExact(), E.BatchDiagGGNExact(), **options):  # type: ignore[arg-type]
            bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        found.append([(p.diag_ggn_exact, p.diag_ggn_exact_batch) for p in model.parameters()])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


BY_OUTPUT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[str]]] = {
    "by output": (lambda v, g: g * v / v.norm(dim=1, keepdim=True), {"v", "g"}),
    "by input": (lambda v, g: v / v.norm(dim=0) + g, {"g"}),
    "of all entries": (lambda v, g: g * v / v.norm(), {"g"}),
    "all outputs alike": (lambda v, g: v.sin() * g.sum(), {"v"}),
}


class Computed(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 3)
        self.v, self.g, self.function = nn.Parameter(torch.randn(20, 20)), nn.Parameter(torch.rand(20, 1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(self.first(x).tanh(), self.function(self.v, self.g)).tanh())


@pytest.mark.parametrize("name", BY_OUTPUT)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_parameters_whose_entries_belong_to_single_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are passed by a row for each sample, whatever the number of columns; of others nothing is believed."""
    torch.manual_seed(0)
    function, expected = BY_OUTPUT[name]
    model, x, y = bpk.extend(Computed(function).double()), rand(7, 20), torch.arange(7) % 3
    served: list[set[str]] = []
    finish = OutputSquares.finish

    def spy(self: OutputSquares, totals: Any) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        served.append({names[id(self.spread.params[k])] for k in self.served})
        finish(self, totals)

    monkeypatch.setattr(OutputSquares, "finish", spy)
    found = []
    for worth in (8, 1 << 30):
        monkeypatch.setattr(by_output, "WORTH", worth)
        extensions = [E.DiagGGNExact(), E.BatchDiagGGNExact(), E.DiagHessian(), E.DiagGGNExact(subsampling=[4, 1])]
        values = []
        for extension in extensions:
            backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, extension)
            values.append([getattr(p, extension.savefield) for p in model.parameters()])
        found.append(values)
    assert expected in served and set() in served
    torch.testing.assert_close(found[0], found[1])
