"""The variance of gradients that hardly differ is not the rounding error of their mean square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.firstorder import variance
from bpk.fields import awaited
from bpk.jacobians.families.autodiff import Autodiff
from tests.references.compare import Assembled

N = 64


class Plain(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Held(nn.Module):
    """A parameter that plain functions use, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mix = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.mix(x) * self.scale))


def conv() -> nn.Module:
    first, last = nn.Conv2d(1, 3, 2, bias=False), nn.Conv2d(3, 2, 2, groups=1)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Upsample(4), first, nn.Tanh(), last, nn.Flatten())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def recurrent() -> nn.Module:
    return Assembled(lambda m, x: m.cell(x.unflatten(1, (2, 2)))[0].flatten(1), cell=nn.GRU(2, 3, batch_first=True))


def merged() -> nn.Module:
    """Rows of a sample are in the batch axis."""
    layers = {"first": nn.Linear(2, 3), "last": nn.Linear(3, 2)}
    return Assembled(lambda m, x: m.last(torch.tanh(m.first(x.reshape(-1, 2)))).reshape(len(x), -1), **layers)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "conv": conv,
    "norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    "generic": lambda: nn.Sequential(Plain(), nn.Linear(4, 2)),
    "held": Held,
    "tied": tied,
    "recurrent": recurrent,
    "merged": merged,
}


def fields(make: Callable[[], nn.Module], dtype: torch.dtype, spread: float, *extensions: type, **options: object):
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(1, 4, dtype=torch.float64) * (1 + spread * torch.randn(N, 4, dtype=torch.float64))
    y = 0.5 + 0.1 * model(x[:1]).detach().expand(N, -1)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.MSELoss())
    with bpk.backpack(*[e(**options) for e in (E.Variance, *extensions)]):
        loss_fn(model(x), y).backward()
    return dict(model.named_parameters())


@pytest.fixture(autouse=True)
def registered():
    rule = bpk.register(Autodiff(Plain, params=("weight",)))
    yield
    bpk.unregister(rule)


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pieces", [1, 3, N])
def test_variance(name: str, spread: float, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As right as that of the individual gradients, whatever is kept."""
    monkeypatch.setattr(variance, "PIECE", pieces * 12)
    monkeypatch.setattr(variance, "LARGE", pieces * 12)  # from here on without a tensor for each product
    exact = fields(MODELS[name], torch.float64, spread, E.BatchGrad)
    rows = fields(MODELS[name], torch.float32, spread, E.BatchGrad)
    found = fields(MODELS[name], torch.float32, spread)
    for key, p in exact.items():
        expected = p.grad_batch.var(0, unbiased=False)
        scale = expected.max()
        by_rows = (rows[key].grad_batch.var(0, unbiased=False).double() - expected).abs().max() / scale
        for mine in (found[key].variance, rows[key].variance):
            error = (mine.double() - expected).abs().max() / scale
            assert error <= max(4 * by_rows, 2e-3), f"{key}: {error:.1e}, by rows {by_rows:.1e}"
        torch.testing.assert_close(p.variance, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spread", [1e-4, 1.0])
@pytest.mark.parametrize("samples", [[0, 5, 9], [3], list(range(N)), [*range(N), 0, 1]], ids=len)
def test_subsampling(samples: list[int], spread: float, dtype: torch.dtype) -> None:
    """Sums over the chosen samples, divided by the number of all."""
    exact = fields(MODELS["mlp"], torch.float64, spread, E.BatchGrad, subsampling=samples)
    found = fields(MODELS["mlp"], dtype, spread, subsampling=samples)
    for key, p in exact.items():
        rows = p.grad_batch
        expected = (rows.square().sum(0) / N - (rows.sum(0) / N).square()).clamp(min=0)
        error = (found[key].variance.double() - expected).abs().max()
        assert error <= 2e-3 * expected.max(), f"{key}: {error}"


@pytest.mark.parametrize("name", ["mlp", "conv", "tied"])
def test_equal_samples(name: str) -> None:
    """Nothing varies; with one sample, too."""
    for key, p in fields(MODELS[name], torch.float32, 0.0, E.BatchGrad).items():
        assert p.variance.max() <= 1e-12 * p.grad_batch.square().max(), key


def test_rows_are_not_formed_where_nothing_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uses: object) -> None:
        raise AssertionError("rows were asked for")

    monkeypatch.setattr(variance, "shifted", fail)
    fields(MODELS["mlp"], torch.float32, 1.0)
    fields(MODELS["conv"], torch.float32, 1.0)
    with pytest.raises(AssertionError, match="rows were asked for"):
        fields(MODELS["mlp"], torch.float32, 1e-4)


def test_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`create_graph`: what is taken from individual gradients can be differentiated, too."""
    monkeypatch.setattr(variance, "cancels", lambda *moments: True)
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(3, 2).double()), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.Variance(), E.BatchGrad()):
        x, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
        loss_fn(model(x), y).backward(create_graph=True)
    w = model.weight
    expected = w.grad_batch.var(0, unbiased=False)
    torch.testing.assert_close(w.variance, expected)
    found = torch.autograd.grad(w.variance.sum(), w, retain_graph=True)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), w)[0])


def test_of_a_function_of_a_parameter_whose_rows_are_one_sample() -> None:
    """Its rule evaluates it again, when autograd has brought the gradient: not as another call."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        rows = (m.first(x).flatten(0, 1) + m.table.weight[m.at, 0]).sin()
        return m.last(rows.unflatten(0, (1, 3)).flatten(1))

    model = Assembled(forward, first=nn.Linear(2, 2), table=nn.Embedding(3, 1), last=nn.Linear(6, 3)).double()
    model.at = torch.tensor([0, 2])
    model, loss_fn = bpk.extend(model, use_converter=True), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.Variance()):
        loss_fn(model(torch.randn(1, 3, 2).double()), torch.tensor([1])).backward()
    for p in model.parameters():
        assert float(p.variance.abs().max()) < 1e-15


def test_a_backward_pass_under_autocast() -> None:
    """What is computed once autograd has brought the gradient has the precision of all the rest."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(nn.MSELoss())
    x, y = torch.randn(6, 5, 4), torch.randn(6, 5, 3)
    found = []
    for extensions in ((E.Variance(),), (E.Variance(), E.BatchGrad())):
        loss = loss_fn(model(x), y)
        with torch.autocast("cpu"), bpk.backpack(*extensions):
            loss.backward()
        found.append(model.weight.variance)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("width", [4, 80])
def test_few_rows_wait_for_no_gradient(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum and squares of few rows are taken of the rows; of many, the sum is what autograd brings."""
    waited: list[tuple[int, ...]] = []

    def expect(parameters: object, record: object, states: dict[str, Any]) -> None:
        waited.extend(tuple(state.param.shape) for state in states.values())
        awaited.expect_gradients(parameters, record, states)  # type: ignore[arg-type]

    monkeypatch.setattr("bpk.observing.expect_gradients", expect)
    layers = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.Flatten())
    model = bpk.extend(nn.Sequential(layers, nn.Linear(3 * width, 2)).double())
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 3, 4).double(), torch.arange(5) % 2
    with bpk.backpack(E.Variance(), E.BatchGrad()):
        loss_fn(model(x), y).backward()
    assert waited == ([] if width == 4 else [(width, width)])
    for p in model.parameters():
        torch.testing.assert_close(p.variance, p.grad_batch.var(0, correction=0))
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
