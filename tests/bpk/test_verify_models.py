"""`bpk.verify` on models of every kind, on Kronecker factors of every layer, and on rules that are wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.rules import REGISTRY
from bpk.verification import Row, Verdict
from bpk.verification.problem import takes_several
from tests.references.compare import Assembled

X, Y, CROSS_ENTROPY = (3, 4), torch.tensor([0, 1, 2]), nn.CrossEntropyLoss()
EXACT = (E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.BatchDiagHessian(), E.HMP(), E.GGNMP(), E.KFLR())
SAMPLED = (E.DiagGGNMC(), E.BatchDiagGGNMC(), E.SqrtGGNMC(), E.KFAC())


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape)


class Model(Assembled):
    """Any arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# ---- losses that look at parts ---------------------------------------------------------------------------
class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Named:
    logits: Tensor
    length: int


class Pick(nn.Module):
    """Cross-entropy of one part of what a model returns."""

    def __init__(self, part: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.part, self.inner = part, nn.CrossEntropyLoss()

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return self.inner(self.part(output), target)


class Two(nn.Module):
    """Two losses, the second behind a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.CrossEntropyLoss(), nn.MSELoss()

    def forward(self, one: Tensor, other: Tensor, label: Tensor, value: Tensor) -> Tensor:
        return self.first(one, label) + 0.3 * self.second(other.tanh(), value)


def of_dict() -> Any:
    model = Model(lambda m, x: {"logits": m.a(x), "size": torch.tensor(3)}, a=nn.Linear(4, 3))
    return model, Pick(lambda out: out["logits"]), torch.randn(X), Y


def of_named_tuple() -> Any:
    model = Model(lambda m, x: Pair(m.b(m.a(x).tanh()), m.a(x)), a=nn.Linear(4, 3), b=nn.Linear(3, 3))
    return model, Pick(lambda out: out.logits), torch.randn(X), Y


def of_dataclass() -> Any:
    return Model(lambda m, x: Named(m.a(x), 3), a=nn.Linear(4, 3)), Pick(lambda out: out.logits), torch.randn(X), Y


def of_two_losses() -> Any:
    model = Model(lambda m, x: (m.b(m.a(x).tanh()), m.a(x)), a=nn.Linear(4, 3), b=nn.Linear(3, 3))
    return model, Two(), torch.randn(X), (Y, torch.randn(3, 3))


def of_named_inputs() -> Any:
    model = Model(lambda m, tokens, mask: m.b((m.a(tokens) * mask[..., None]).sum(1)), a=nn.Embedding(7, 4))
    model.b = nn.Linear(4, 3)
    return model, CROSS_ENTROPY, {"tokens": tokens(3, 5), "mask": torch.ones(3, 5).tril()}, Y


def of_nested_inputs() -> Any:
    model = Model(lambda m, xs, scale: m.a(xs[0] + xs[1]) * scale, a=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, ([torch.randn(X), torch.randn(X)], 2.0), Y


def of_pixels() -> Any:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(2, 2, 2, 2), nn.Conv2d(2, 3, 1))
    return model, CROSS_ENTROPY, torch.randn(2, 1, 2, 2), torch.randint(3, (2, 4, 4))


KINDS = (of_dict, of_named_tuple, of_dataclass, of_two_losses, of_named_inputs, of_nested_inputs, of_pixels)


@pytest.mark.parametrize("make", KINDS)
def test_any_model(make: Callable[[], Any]) -> None:
    problem = make()
    result = bpk.verify(*problem, *EXACT, *SAMPLED)
    assert len(result.of(Verdict.OK)) == len(result.rows), result.summary()
    assert len(result.rows) == 11 * len(list(problem[0].parameters()))


@pytest.mark.parametrize("loss", [nn.TripletMarginLoss(margin=3.0), nn.CosineEmbeddingLoss()])
def test_losses_of_several_predictions(loss: nn.Module) -> None:
    """Gradients are right; second order is right or refused."""
    model = Model(lambda m, *xs: tuple(m.a(x).tanh() for x in xs), a=nn.Linear(4, 3))
    count, targets = (3, None) if isinstance(loss, nn.TripletMarginLoss) else (2, torch.tensor([1, -1, 1]))
    result = bpk.verify(model, loss, tuple(torch.randn(X) for _ in range(count)), targets, *EXACT)
    assert result.ok, result
    assert {row.quantity for row in result.of(Verdict.OK)} >= {"BatchGrad", "Variance"}
    assert not result.of(Verdict.UNCHECKED), result


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MSELoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target) ** 2


class Regularised(Squared):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target) + 0.1 * (output**4).mean()


def test_objectives_that_are_no_sums_of_losses() -> None:
    """One that treats samples apart is served as a whole, one that couples them is refused in second order."""
    second = E.DiagGGNExact(), E.DiagHessian(), E.KFLR()
    data = torch.randn(X), torch.randn(3, 2)
    whole = bpk.verify(nn.Linear(4, 2), Regularised(), *data, E.BatchGrad(), *second)
    assert {row.verdict for row in whole.rows} == {Verdict.OK}, whole
    coupled = bpk.verify(nn.Linear(4, 2), Squared(), *data, *second)
    assert {row.verdict for row in coupled.rows} == {Verdict.REFUSED}, coupled
    assert "couples the samples" in coupled.rows[0].note


class Takes(nn.Module):
    def forward(self, output: Any, target: Any, weight: Any = None) -> Any: ...


class TakesAny(nn.Module):
    def forward(self, *args: Any) -> Any: ...


def test_how_a_loss_is_called() -> None:
    assert not takes_several(Takes(), 2, 1)
    assert takes_several(Takes(), 2, 0) and takes_several(TakesAny(), 2, 1)
    assert takes_several(nn.TripletMarginLoss(), 3, 0) and takes_several(nn.CosineEmbeddingLoss(), 2, 1)
    assert not takes_several(nn.CrossEntropyLoss(), 2, 1)


# ---- Kronecker factors -----------------------------------------------------------------------------------
def recurrent(layer: nn.RNNBase) -> Any:
    width = layer.hidden_size * (2 if layer.bidirectional else 1)
    model = Model(lambda m, x: m.b(m.a(x)[0].sum(1)), a=layer, b=nn.Linear(width, 3))
    return model, CROSS_ENTROPY, torch.randn(3, 5, 4), Y


def in_a_loop(cell: nn.RNNCellBase) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m.a(step, state)
        return m.b(state[0] if isinstance(state, tuple) else state)

    return Model(forward, a=cell, b=nn.Linear(3, 3)), CROSS_ENTROPY, torch.randn(3, 4, 4), Y


def tied_table() -> Any:
    model = Model(lambda m, t: m.c(m.b(m.a(t)).tanh()).flatten(0, 1), a=nn.Embedding(7, 4, padding_idx=1))
    model.b, model.c = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
    model.c.weight = model.a.weight
    return model, CROSS_ENTROPY, tokens(3, 5), tokens(15)


def tied_linear() -> Any:
    model = Model(lambda m, x: m.c(m.b(m.a(x).tanh())), a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
    model.b.weight = model.a.weight
    return model, CROSS_ENTROPY, torch.randn(X), Y


def tied_tables() -> Any:
    model = Model(lambda m, t: m.c((m.a(t) + m.b(t.flip(1))).tanh().mean(1)), a=nn.Embedding(7, 4), c=nn.Linear(4, 3))
    model.b = nn.Embedding(7, 4)
    model.b.weight = model.a.weight
    return model, CROSS_ENTROPY, tokens(3, 5), Y


def reused_convolution() -> Any:
    model = Model(lambda m, x: m.b(m.a(m.a(x).tanh()).flatten(1)), a=nn.Conv1d(2, 2, 3, padding=1), b=nn.Linear(8, 3))
    return model, CROSS_ENTROPY, torch.randn(3, 2, 4), Y


def attention() -> Any:
    layer = nn.MultiheadAttention(4, 2, kdim=5, vdim=3, batch_first=True)
    model = Model(lambda m, q, k: m.b(m.a(q, k, k[..., :3])[0].mean(1)), a=layer, b=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, (torch.randn(3, 5, 4), torch.randn(3, 6, 5)), Y


def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    model = Model(lambda m, x: m.b(m.a(x)).transpose(1, 2), a=layer, b=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, torch.randn(3, 4, 4), torch.randint(3, (3, 4))


def bag() -> Any:
    model = Model(lambda m, t: m.b(m.a(t).tanh()), a=nn.EmbeddingBag(7, 4, mode="mean"), b=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, tokens(3, 5), Y


def renormalised_table() -> Any:
    model = Model(lambda m, t: m.b(m.a(t).tanh()).mean(1), a=nn.Embedding(7, 4, max_norm=0.5), b=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, tokens(3, 5), Y


def renormalised_bag() -> Any:
    model = Model(lambda m, t: m.b(m.a(t).tanh()), a=nn.EmbeddingBag(7, 4, max_norm=0.5, mode="sum"), b=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, tokens(3, 5), Y


FACTORS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: recurrent(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)),
    "GRU": lambda: recurrent(nn.GRU(4, 3, 2, batch_first=True)),
    "RNN": lambda: recurrent(nn.RNN(4, 3, batch_first=True, nonlinearity="relu")),
    "RNNCell": lambda: in_a_loop(nn.RNNCell(4, 3)),
    "LSTMCell": lambda: in_a_loop(nn.LSTMCell(4, 3)),
    "GRUCell": lambda: in_a_loop(nn.GRUCell(4, 3)),
    "tied table": tied_table,
    "tied linear": tied_linear,
    "tied tables": tied_tables,
    "reused convolution": reused_convolution,
    "attention": attention,
    "transformer": transformer,
    "bag": bag,
    "renormalised table": renormalised_table,
    "renormalised bag": renormalised_bag,
}


@pytest.mark.parametrize("make", FACTORS.values(), ids=FACTORS)
def test_factors(make: Callable[[], Any]) -> None:
    result = bpk.verify(*make(), E.KFLR(), E.KFAC())
    assert len(result.of(Verdict.OK)) == len(result.rows), result.summary()


@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("make", FACTORS.values(), ids=FACTORS)
def test_wrong_factors_are_found(make: Callable[[], Any], factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = E.KFLR.value

    def wrong(self: E.KFLR, uses: Any) -> list[Tensor]:
        return [part * 1.001 if k == factor else part for k, part in enumerate(right(self, uses))]

    monkeypatch.setattr(E.KFLR, "value", wrong)
    result = bpk.verify(*make(), E.KFLR())
    flat = ("norm", "k_proj")  # without input factor; a bias of all keys changes no attention weight
    rows = [row for row in result.rows if not any(part in row.parameter for part in flat)]
    shapes = {name: p.dim() for name, p in make()[0].named_parameters()}
    concerned = {row.parameter for row in rows if factor == 0 or shapes[row.parameter] > 1}
    assert {row.parameter for row in result.wrong} >= concerned, result


def test_factors_of_some_samples() -> None:
    result = bpk.verify(*FACTORS["LSTM"](), E.KFLR(subsampling=[2, 0]), E.KFAC(3, subsampling=[1]))
    assert len(result.of(Verdict.OK)) == len(result.rows), result.summary()


class TiedByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(7, 4)

    def forward(self, t: Tensor) -> Tensor:
        return F.linear(self.a(t), self.a.weight)


class ScaledByFunction(TiedByFunction):
    def forward(self, t: Tensor) -> Tensor:
        return F.linear(self.a(t), self.a.weight * 2)


@pytest.mark.parametrize("extension", [E.KFLR(), E.KFAC(), E.KFRA()], ids=str)
@pytest.mark.parametrize("use_converter", [True, False])
def test_weights_that_are_used_outside_of_their_module(extension: E.BackpropExtension, use_converter: bool) -> None:
    """A function that multiplies with a weight is a linear layer; what other functions make of it is not known."""
    (row,) = bpk.verify(TiedByFunction(), CROSS_ENTROPY, tokens(3), Y, extension, use_converter=use_converter).rows
    assert row.verdict is Verdict.OK, row
    if not isinstance(extension, E.KFRA):  # which refuses it
        (row,) = bpk.verify(ScaledByFunction(), CROSS_ENTROPY, tokens(3), Y, extension).rows
        assert row.verdict is Verdict.OK, row  # its whole block
    assert bpk.verify(TiedByFunction(), CROSS_ENTROPY, tokens(3), Y, E.GGNMP(), use_converter=use_converter)


class Stored(nn.Module):
    """A matrix `[in, out]`, and positions."""

    def __init__(self, positions: int = 2) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 3))
        self.positions = nn.Parameter(torch.randn(positions, 3))

    def forward(self, x: Tensor) -> Tensor:
        return ((torch.tanh(self.first(x))[:, None] + self.positions) @ self.w).mean(1)


@pytest.mark.parametrize("extension", [E.KFLR(), E.KFAC(), E.KFRA()], ids=str)
def test_matrices_of_functions(extension: E.BackpropExtension) -> None:
    result = bpk.verify(Stored(), CROSS_ENTROPY, torch.randn(X), Y, extension)
    assert len(result.of(Verdict.OK)) == 4, result


@pytest.mark.parametrize("factor", [0, 1])
def test_wrong_factors_of_matrices_of_functions(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = E.KFLR.value

    def wrong(self: E.KFLR, uses: Any) -> list[Tensor]:
        return [f * 1.1 if k == factor else f for k, f in enumerate(right(self, uses))]

    monkeypatch.setattr(E.KFLR, "value", wrong)
    result = bpk.verify(Stored(), CROSS_ENTROPY, torch.randn(X), Y, E.KFLR())
    assert "w" in {row.parameter for row in result.wrong}, result


def test_diagonals_of_large_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("bpk.jacobians.core.room.WHOLE", "bpk.verification.kronecker.WHOLE"):
        monkeypatch.setattr(place, 5)
    for extension in (E.KFLR(), E.KFAC()):
        result = bpk.verify(Stored(), CROSS_ENTROPY, torch.randn(X), Y, extension)
        assert len(result.of(Verdict.OK)) == 4, result
    monkeypatch.setattr("bpk.verification.kronecker.WHOLE", 50)
    assert [row.parameter for row in bpk.verify(Stored(), CROSS_ENTROPY, torch.randn(X), Y, E.KFLR()).wrong] == [
        "positions"
    ]


def test_weights_that_are_only_looked_at() -> None:
    def forward(m: Any, t: Tensor) -> Tensor:
        m.a.weight.norm()  # the loss does not depend on it
        return m.b(m.a(t).to(m.a.weight))

    model = Model(forward, a=nn.Embedding(7, 4), b=nn.Linear(4, 3))
    result = bpk.verify(model, CROSS_ENTROPY, tokens(3), Y, E.KFLR())
    assert len(result.of(Verdict.OK)) == 3, result


# ---- rules that are wrong ----------------------------------------------------------------------------------
def network() -> Any:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3))
    return model, CROSS_ENTROPY, torch.randn(X), Y


SECOND_ORDER = (
    E.DiagGGNExact(),
    E.BatchDiagGGNExact(),
    E.SqrtGGNExact(),
    E.GGNMP(),
    E.KFLR(),
    E.KFRA(),
    E.DiagHessian(),
    E.HMP(),
    *SAMPLED,
)


@pytest.mark.parametrize("extension", SECOND_ORDER, ids=str)
def test_one_percent_in_an_input_product(extension: E.BackpropExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything below the activation is wrong, and nothing above."""
    rule = REGISTRY.find(nn.Tanh)
    assert rule is not None
    for product in ("jac_t_mat_prod", "congruence"):
        right = vars(type(rule)).get(product) or getattr(rule, product).__func__
        monkeypatch.setattr(rule, product, lambda *a, right=right, **k: right(rule, *a, **k) * 1.01, raising=False)
    result = bpk.verify(*network(), extension)
    assert {row.parameter for row in result.wrong} == {"0.weight", "0.bias"}, result
    assert len(result.of(Verdict.OK)) == 4


@pytest.mark.parametrize("extension", [E.BatchGrad(), E.Variance(), E.SumGradSquared(), E.BatchL2Grad()], ids=str)
def test_one_percent_in_a_parameter_product(extension: E.BackpropExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = REGISTRY.find(nn.Linear)
    assert rule is not None

    def but_for_biases(product: str) -> Callable[..., Any]:
        right = getattr(type(rule), product)
        at = 1 if product == "squared_sum_of_blocks" else 2

        def wrong(*args: Any, **kwargs: Any) -> Any:
            value = right(rule, *args, **kwargs)
            return value * 1.01 if args[at] == "weight" and isinstance(value, Tensor) else value

        return wrong

    for product in ("jac_t_mat_prod", "squared_sum", "norm_squared"):
        monkeypatch.setattr(rule, product, but_for_biases(product), raising=False)
    monkeypatch.setattr(rule, "squared_sum_of_blocks", lambda *args: None, raising=False)
    result = bpk.verify(*network(), extension)
    assert {row.parameter for row in result.wrong} == {"0.weight", "2.weight", "4.weight"}, result


@pytest.mark.parametrize("extension", SAMPLED, ids=str)
def test_biased_draws(extension: E.BackpropExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    rule: Any = REGISTRY.find(nn.CrossEntropyLoss)
    right = type(rule).sqrt_hessian_sampled
    monkeypatch.setattr(rule, "sqrt_hessian_sampled", lambda call, m: right(rule, call, m) * 1.2, raising=False)
    result = bpk.verify(*network(), extension)
    assert len(result.wrong) == 6 and "the mean of 20000 draws of an entry of the loss Hessian" in result.wrong[0].note


# ---- where it looks, and what it says ------------------------------------------------------------------------
def test_tables_are_compared_where_tokens_are() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Flatten(), nn.Linear(8, 3))
    result = bpk.verify(model, CROSS_ENTROPY, tokens(3, 2), Y, E.BatchGrad(), E.DiagGGNExact(), E.KFLR())
    assert result.ok and not [row for row in result.rows if "zero" in row.note], result
    loss = nn.L1Loss()
    flat = bpk.verify(nn.Linear(4, 3), loss, torch.randn(X), torch.randn(3, 3), E.DiagGGNExact())
    assert {row.note for row in flat.rows} == {"all that was compared is zero"}


def test_fewer_entries_are_said() -> None:
    result = bpk.verify(*network(), E.BatchDiagHessian(), E.HMP(), passes=1)
    assert {(row.quantity, row.entries) for row in result.rows if row.quantity != "HMP"} == {("BatchDiagHessian", 1)}
    assert all("fewer entries than asked for" in row.note for row in result.rows if row.quantity != "HMP")
    assert all(not row.note for row in result.rows if row.quantity == "HMP")


def test_summary_says_why() -> None:
    class Own(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).square().mean().sqrt()  # couples the samples

    result = bpk.verify(nn.Linear(4, 3), Own(), torch.randn(X), torch.randn(3, 3), E.DiagGGNExact(), E.KFAC())
    head, *reasons = result.summary().splitlines()
    assert head == "4 refused; nothing was verified" and not result
    assert len(reasons) == 1 and reasons[0].startswith("  4 refused (DiagGGNExact, KFAC): it cannot start at loss")
    assert str(result).endswith(result.summary())
    rows = tuple(Row("p", f"Q{k}", Verdict.UNCHECKED, note="no") for k in range(5))
    assert bpk.verification.Verification(rows).reasons() == ["  5 not checked (5 quantities): no"]


def test_progress_says_what_it_is_doing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 20)
    monkeypatch.setattr("bpk.progress.time.monotonic", lambda: next(clock))
    bpk.verify(*network(), E.DiagHessian(), E.BatchGrad(), progress=True)
    shown = capsys.readouterr().err
    assert "backward pass 1 of 1, at 2" in shown and "Hessian of 2.weight" in shown
    steps = re.findall(r"^step (\d) of 4(, [\d:]+ left)?, (bpk|autograd): ", shown, re.MULTILINE)
    of = [(step, who) for step, _, who in steps]
    assert list(dict.fromkeys(of)) == [("1", "bpk"), ("2", "bpk"), ("3", "autograd"), ("4", "autograd")], shown
    assert all(bool(time) == (step == "4") for step, time, _ in steps), "only references foretell references"


def test_certain_predictions_of_two_losses() -> None:
    """Rare events are no mistakes: the draws of both losses are known."""
    model, loss, x, targets = of_two_losses()
    with torch.no_grad():
        model.b.weight *= 20
    assert bpk.verify(model, loss, x, targets, *SAMPLED)


def test_draws_that_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of many draws is compared: coarser, but what is far off is found."""
    monkeypatch.setattr("bpk.verification.assemble.Draws.of", lambda problem: None)
    result = bpk.verify(*network(), *SAMPLED)
    assert result and all("mean of 50 draws" in row.note for row in result.of(Verdict.OK)), result
    right = E.DiagGGNMC.value
    monkeypatch.setattr(E.DiagGGNMC, "value", lambda self, uses: right(self, uses) * 3)
    assert bpk.verify(*network(), E.DiagGGNMC()).wrong
