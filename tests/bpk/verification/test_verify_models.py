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

import bpk
from bpk import extensions as E
from bpk.jacobians.losses.loss import AutodiffLoss
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


class Squashed(nn.Linear):
    """A layer that uses its weight through a function."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found.tanh() if name == "weight" and "ready" in vars(self) else found


def test_a_parameter_behind_a_property() -> None:
    layer = Squashed(4, 3)
    layer.ready = True
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3))
    assert bpk.verify(model, CROSS_ENTROPY, torch.randn(X), Y, E.BatchGrad(), E.DiagGGNExact()).ok


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
    """One that treats samples apart is served as a whole, one that couples them has sums over the batch."""
    second = E.DiagGGNExact(), E.DiagHessian(), E.KFLR()
    data = torch.randn(X), torch.randn(3, 2)
    whole = bpk.verify(nn.Linear(4, 2), Regularised(), *data, E.BatchGrad(), *second)
    assert {row.verdict for row in whole.rows} == {Verdict.OK}, whole
    coupled = bpk.verify(nn.Linear(4, 2), Squared(), *data, *second)
    assert {row.verdict for row in coupled.rows if row.quantity != "KFLR"} == {Verdict.OK}, coupled
    notes = [row.note for row in coupled.rows if row.verdict is Verdict.REFUSED]
    assert len(notes) == 2 and all("couples the samples" in note for note in notes)


class Takes(nn.Module):
    def forward(self, output: Any, target: Any, weight: Any = None) -> Any: ...


class TakesAny(nn.Module):
    def forward(self, *args: Any) -> Any: ...


def test_how_a_loss_is_called() -> None:
    assert not takes_several(Takes(), 2, 1)
    assert takes_several(Takes(), 2, 0) and takes_several(TakesAny(), 2, 1)
    assert takes_several(nn.TripletMarginLoss(), 3, 0) and takes_several(nn.CosineEmbeddingLoss(), 2, 1)
    assert not takes_several(nn.CrossEntropyLoss(), 2, 1)


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

    for product in ("jac_t_mat_prod", "individual", "squared_sum", "norm_squared"):
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


class Sum(nn.Module):
    """With a rule, and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.MSELoss(), Far()

    def forward(self, one: Tensor, other: Tensor, target: Tensor) -> Tensor:
        return self.first(one, target) + 0.3 * self.second([other], target)


class Far(nn.Module):
    """A loss of one's own, of any number of predictions, given as a list."""

    def forward(self, predictions: list[Tensor], target: Tensor) -> Tensor:
        return sum(((x - target) ** 2 + (x - target).cosh()).mean() for x in predictions) / 7  # type: ignore[return-value]


class Apart(nn.Module):
    def forward(self, one: Tensor, other: Tensor, target: Tensor) -> Tensor:
        return ((one - other).cosh() + (one - target) ** 2).mean()


def of_pair(loss: nn.Module, *targets: Tensor) -> Any:
    return (
        Model(lambda m, x: (m.a(x).tanh(), m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3)),
        loss,
        torch.randn(X),
        targets,
    )


OWN: dict[str, Callable[[], Any]] = {
    "both sides of MSELoss": lambda: of_pair(nn.MSELoss()),
    "two predictions": lambda: of_pair(Apart(), torch.randn(3, 3)),
    "a list": lambda: of_pair(Far(), torch.randn(3, 3)),
    "a sum": lambda: of_pair(Sum(), torch.randn(3, 3)),
    "one prediction": lambda: (nn.Linear(4, 2), Far(), torch.randn(X), torch.randn(3, 2)),
    "a penalty": lambda: (nn.Linear(4, 2), Regularised(), torch.randn(X), torch.randn(3, 2)),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_draws_of_losses_without_a_rule(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one's own, or of several predictions: they are repeated, and so what is a little off is found."""
    problem, quantities = make(), (*SAMPLED, E.DiagJTJMC())
    result = bpk.verify(*problem, *quantities)
    assert result and all("repeated" in row.note for row in result.rows), result
    right = AutodiffLoss.sqrt_hessian_sampled
    monkeypatch.setattr(AutodiffLoss, "sqrt_hessian_sampled", lambda self, call, m: right(self, call, m) * 1.2)
    biased = bpk.verify(*problem, *SAMPLED)
    assert {row.verdict for row in biased.rows} == {Verdict.WRONG}, biased
    monkeypatch.setattr(AutodiffLoss, "sqrt_hessian_sampled", right)
    of_uses = E.DiagGGNMC.value
    monkeypatch.setattr(E.DiagGGNMC, "value", lambda self, uses: of_uses(self, uses) * 1.01)
    assert {row.verdict for row in bpk.verify(*problem, E.DiagGGNMC()).rows} == {Verdict.WRONG}


@pytest.mark.parametrize("make", [of_two_losses, OWN["two predictions"]])
def test_draws_of_passes_that_do_not_reach_all_predictions(make: Callable[[], Any]) -> None:
    """Then a pass draws something else than one for all parameters, which had been called wrong."""
    result = bpk.verify(*make(), *SAMPLED, memory=300 * 8 / 2**30)
    assert not result.wrong and {"mean of 50 draws, within 8 standard errors"} & {row.note for row in result.rows}, (
        result
    )


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

    result = bpk.verify(nn.Linear(4, 3), Own(), torch.randn(X), torch.randn(3, 3), E.KFLR(), E.KFAC())
    head, *reasons = result.summary().splitlines()
    assert head == "4 refused; nothing was verified" and not result
    assert len(reasons) == 1 and reasons[0].startswith("  4 refused (KFLR, KFAC): it cannot start at loss")
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
    monkeypatch.setattr("bpk.verification.assemble.Draws.of", lambda *problem: None)
    result = bpk.verify(*network(), *SAMPLED)
    assert result and all("mean of 50 draws" in row.note for row in result.of(Verdict.OK)), result
    right = E.DiagGGNMC.value
    monkeypatch.setattr(E.DiagGGNMC, "value", lambda self, uses: right(self, uses) * 3)
    assert bpk.verify(*network(), E.DiagGGNMC()).wrong


def test_losses_that_torch_differentiates_once() -> None:
    """Nobody knows then what draws must be in the mean."""
    result = bpk.verify(nn.Linear(4, 3), nn.MultiMarginLoss(p=2), torch.randn(5, 4), torch.arange(5) % 3, *SAMPLED)
    assert not result.wrong and all("plain autograd cannot" in row.note for row in result.rows), result


# ---- samples in another order ----------------------------------------------------------------------------
class Reordered(nn.Module):
    """Layers see samples in an order of their own, and so may the loss."""

    def __init__(self, back: bool, steps: int) -> None:
        super().__init__()
        self.first, self.last, self.back, self.steps = nn.Linear(4, 5), nn.Linear(5, 3), back, steps

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        h = self.first(x[order]).tanh()[order.argsort() if self.back else slice(None)]
        return self.last(h.expand(self.steps, *h.shape)).flatten(0, 1)


@pytest.mark.parametrize(("back", "steps"), [(True, 1), (False, 1), (False, 3)])
def test_samples_have_the_numbers_of_their_rows_in_the_loss(
    back: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    problem = Reordered(back, steps), CROSS_ENTROPY, torch.randn(5, 4), torch.randint(3, (5 * steps,)), E.BatchGrad()
    assert bpk.verify(*problem, samples=5)
    right = E.BatchGrad.value
    monkeypatch.setattr(E.BatchGrad, "value", lambda self, uses: right(self, uses).roll(1, 0))
    assert len(bpk.verify(*problem, samples=5).wrong) == 4


def test_predictions_of_one_number_for_each_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    assert bpk.verify(
        model, nn.MSELoss(), torch.randn(5, 4)[torch.tensor([0, 0, 1, 2, 3])], torch.randn(5), E.BatchGrad()
    )


class Bags(nn.Module):
    """Bags of words that begin at offsets, which nobody can exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(5, 3), nn.Linear(3, 2)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.words(words, offsets).tanh())


def test_inputs_that_cannot_be_exchanged() -> None:
    """The model raises whatever it raises then; sums over the batch are verified all the same."""
    inputs, y = (torch.randint(5, (3,)), torch.tensor([0, 1, 1])), torch.arange(3) % 2
    found = bpk.verify(Bags(), nn.CrossEntropyLoss(), inputs, y, E.BatchGrad(), E.DiagGGNExact(), E.DiagGGNMC())
    assert {row.quantity for row in found.of(Verdict.OK)} >= {"DiagGGNExact"} and not found.wrong, found
    unchecked = [row for row in found.of(Verdict.UNCHECKED) if row.quantity != "DiagGGNMC"]
    assert {row.quantity for row in unchecked} == {"BatchGrad"}
    assert "offsets[0] has to be 0" in unchecked[0].note


class Graphs(nn.Module):
    """A batch of graphs, of three nodes each, that are one matrix of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        return self.last((neighbours @ self.first(nodes)).tanh().view(-1, 3, 4).mean(1))


def test_draws_of_graphs_that_are_one_tensor() -> None:
    """Exchanged nodes reach other graphs; the pass keeps these apart, and so their draws."""
    torch.manual_seed(0)
    inputs, y = (torch.randn(6, 3), torch.block_diag(*torch.rand(2, 3, 3))), torch.arange(2)
    found = bpk.verify(Graphs(), nn.CrossEntropyLoss(), inputs, y, E.DiagGGNExact(), E.DiagGGNMC())
    assert not found.wrong, found
