"""Factors with many rows that are their diagonals: `diagonal_above=` of KFAC and its relatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk import preconditioners
from bpk.extensions.secondorder.strategies import BackpropStrategy
from bpk.jacobians.core import room
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.utils.damped import DampedInverse
from tests.helpers import backward

ABOVE = 5
WORDS = 9


@pytest.fixture(autouse=True)
def in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


class Language(nn.Module):
    """Predicts a word at each position; the head may be tied to the table, or be used twice."""

    def __init__(self, tied: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)
        self.twice = twice
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        inner = torch.tanh(self.inner(self.table(words)))
        out = self.head(inner) + self.head(inner**2) if self.twice else self.head(inner)
        return out.transpose(1, 2)


class Recurrent(nn.Module):
    """A recurrent layer, of which the last step counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.GRU(7, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)[0][:, -1])


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (3, 5)), torch.randint(WORDS, (3, 5))


MODELS: dict[str, Any] = {
    "linear": lambda: (nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 6)), torch.randn(4, 7), torch.arange(4)),
    "last layer": lambda: (nn.Linear(7, 6), torch.randn(4, 7), torch.arange(4)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(2, 6, 3), nn.Sigmoid(), nn.Conv2d(6, 8, 2, groups=2), nn.Flatten(), nn.Linear(32, 3)),
        torch.randn(4, 2, 5, 5),
        torch.arange(4) % 3,
    ),
    "words": lambda: (Language(), *words()),
    "used twice": lambda: (Language(twice=True), *words()),
    "recurrent": lambda: (Recurrent(), torch.randn(4, 3, 7), torch.arange(4) % 2),
}


def factors(model: nn.Module, extension: E.HBP, x: Tensor, y: Tensor) -> dict[str, list[Tensor]]:
    torch.manual_seed(1)
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, extension)
    return {name: getattr(p, extension.savefield) for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("approximation", ["default", "expand", "reduce"])
@pytest.mark.parametrize("extension", [E.KFAC, E.KFLR])
@pytest.mark.parametrize("name", MODELS)
def test_diagonals_of_the_dense_factors(name: str, extension: Any, approximation: str) -> None:
    """And no sooner than a factor has more rows than that."""
    model, x, y = MODELS[name]()
    whole = factors(model, extension(approximation=approximation), x, y)
    found = factors(model, extension(approximation=approximation, diagonal_above=ABOVE), x, y)
    assert any(factor.is_sparse for mine in found.values() for factor in mine)
    for param, mine in found.items():
        for factor, dense in zip(mine, whole[param], strict=True):
            assert factor.is_sparse == (len(dense) > ABOVE)
            torch.testing.assert_close(factor.to_dense(), dense.diagonal().diag() if len(dense) > ABOVE else dense)


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("name", ["linear", "last layer", "convolutions", "words", "recurrent"])
def test_verified(name: str) -> None:
    """Also the eigenbases of such factors, which are axes."""
    model, x, y = MODELS[name]()
    options = {"diagonal_above": ABOVE}
    quantities = E.KFLR(**options), E.KFAC(**options), E.EKFLR(**options), E.EKFAC(**options)
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, raise_on_error=True)
    assert "not checked" not in str(result)


def test_dense_factors_are_not_taken_for_diagonals() -> None:
    """What `verify` would say of factors that are dense, and should not be."""
    model, x, y = MODELS["linear"]()
    lying = E.KFLR()
    lying.diagonal_above = ABOVE
    lying.value = lambda uses: uses.factors()  # type: ignore[method-assign]
    assert "WRONG" in str(bpk.verify(model, nn.CrossEntropyLoss(), x, y, lying))


def test_a_table_tied_to_the_head() -> None:
    """The product is the one nearest to the sum of those with diagonals."""
    model, (x, y) = Language(tied=True), words()
    bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.KFLR(diagonal_above=ABOVE), raise_on_error=True)
    of_words, of_features = factors(model, E.KFLR(diagonal_above=ABOVE), x, y)["table.weight"]
    assert of_words.is_sparse and not of_features.is_sparse


@pytest.mark.parametrize("kind", ["tied", "twice"])
def test_in_half_precision(kind: str) -> None:
    """Where sparse factors add up, of which torch has no sum in float16 on processors."""
    x, y = words()
    factors = {}
    for dtype in (torch.float64, torch.float16):
        torch.manual_seed(0)
        model = bpk.extend(Language(**{kind: True}).to(dtype))
        backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, E.KFLR(diagonal_above=ABOVE))
        factors[dtype] = [factor.to_dense().double() for factor in model.head.weight.kflr]
    for half, exact in zip(factors[torch.float16], factors[torch.float64], strict=True):
        torch.testing.assert_close(half, exact, rtol=0.05, atol=0.02 * float(exact.abs().max()))


def test_nothing_of_the_dense_factor_stays() -> None:
    """Also where the loss gives the factor of the last layer as a whole."""
    model, x, y = MODELS["last layer"]()
    for factor in factors(model, E.KFLR(diagonal_above=ABOVE), x, y)["weight"]:
        assert factor.coalesce().values().untyped_storage().size() == 8 * len(factor)


def test_moments_add_up_to_the_trace() -> None:
    model, x, y = MODELS["linear"]()
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    backward(bpk.extend(model), loss_fn, x, y, E.EKFLR(diagonal_above=ABOVE), E.DiagGGNExact())
    for p in model.parameters():
        torch.testing.assert_close(p.ekflr.moments.sum(), p.diag_ggn_exact.sum())


def test_of_a_data_set() -> None:
    model, x, y = MODELS["words"]()
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.KFLR(diagonal_above=ABOVE)).field("kflr")
    whole = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.KFLR()).field("kflr")
    for name, mine in found.items():
        for factor, dense in zip(mine, whole[name], strict=True):
            expected = dense.diagonal().diag() if len(dense) > ABOVE else dense
            torch.testing.assert_close(factor.to_dense(), expected)


@pytest.mark.parametrize("kind", ["KFAC", "EKFAC"])
def test_preconditioner(kind: str) -> None:
    """A step is that of the factors of the batch."""
    model, x, y = MODELS["words"]()
    loss_fn, options = bpk.extend(nn.CrossEntropyLoss()), {"mc_samples": None, "diagonal_above": ABOVE}
    preconditioner = getattr(preconditioners, kind)(model, damping=0.1, **options)
    with preconditioner:
        loss_fn(model(x), y).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    preconditioner.step()
    found = {name: p.grad.clone() for name, p in preconditioner.params.items() if p.grad is not None}
    for name, mine in factors(model, E.KFLR(diagonal_above=ABOVE), x, y).items():
        if kind == "KFAC" and name != "table.weight":
            inverse = DampedInverse([factor.to_dense() for factor in mine], 0.1)
            expected = inverse(gradients[name].flatten()).view_as(gradients[name])
            torch.testing.assert_close(found[name], expected)
    assert found.keys() == gradients.keys() and all(bool(grad.isfinite().all()) for grad in found.values())


def test_operator() -> None:
    model, x, y = MODELS["linear"]()
    operator = bpk.operators.KFAC(model, nn.CrossEntropyLoss(), (x, y), diagonal_above=ABOVE)
    direction = torch.randn(operator.shape[1])
    inverse = operator.inverse(0.1) @ direction
    torch.testing.assert_close(operator @ inverse + 0.1 * inverse, direction)
    assert operator.factors["2.weight"][0].is_sparse


def test_refused() -> None:
    with pytest.raises(ValueError, match="travel whole"):
        E.HBP(backprop_strategy=BackpropStrategy.BATCH_AVERAGE, diagonal_above=ABOVE)
    with pytest.raises(ValueError, match="whole number of at least 1"):
        E.KFAC(diagonal_above=0)


def test_no_memory_for_a_dense_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is allocated, and says what to do, which works."""
    monkeypatch.setattr(room, "LARGE", 8 * 6 * 6 - 1)
    monkeypatch.setattr(room, "free_memory", lambda device: 1000)
    model, x, y = MODELS["linear"]()
    factors(model, E.KFLR(), x[:, :7], y)
    monkeypatch.setattr(room, "free_memory", lambda device: 500)
    with pytest.raises(UnsupportedLayer, match=r"500 bytes are free(.|\n)*diagonal_above"):
        factors(model, E.KFLR(), x, y)
    assert factors(model, E.KFLR(diagonal_above=ABOVE), x, y)["2.bias"][0].is_sparse


def test_how_much_memory_is_free(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       24684016 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(room, "MEMORY", told)
    assert room.free_memory(torch.device("cpu")) == 1 << 20
    monkeypatch.setattr(room, "MEMORY", tmp_path / "none")
    assert room.free_memory(torch.device("cpu")) is None
