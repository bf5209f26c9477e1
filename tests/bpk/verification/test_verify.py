"""`bpk.verify` finds what is right, what is wrong, and says what it did not check; and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.registry import every_extension
from bpk.jacobians import Elementwise
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.normalization import Normalization
from bpk.rules import REGISTRY
from bpk.sweeps.starts import square_root
from bpk.sweeps.starts.square_root import random_signs
from bpk.verification import Verdict, draws
from tests.references.compare import Assembled

DRAWN = (E.DiagGGNMC, E.BatchDiagGGNMC, E.SqrtGGNMC, E.KFAC)

EXACT = [extension for extension in every_extension() if not isinstance(extension, DRAWN)]

Data = tuple[nn.Module, nn.Module, Any, Tensor]


def mlp() -> Data:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    return model, nn.CrossEntropyLoss(), torch.randn(4, 4), torch.tensor([0, 1, 2, 1])


def cnn() -> Data:
    layers = [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.ConvTranspose2d(4, 4, 2, 2, groups=2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).eval(), nn.MSELoss(), torch.randn(3, 2, 4, 4), torch.randn(3, 3)


def lstm() -> Data:
    model = Assembled(
        lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=nn.LSTM(3, 3, 2, batch_first=True), out=nn.Linear(3, 2)
    )
    return model, nn.CrossEntropyLoss(), torch.randn(3, 4, 3), torch.tensor([0, 1, 1])


def encoder() -> Data:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
    model = Assembled(lambda m, x: m.head(m.layer(m.embed(x)).mean(1)), embed=nn.Embedding(5, 4, padding_idx=0))
    model.layer, model.head = layer, nn.Linear(4, 3)
    return model, nn.CrossEntropyLoss(), torch.randint(5, (3, 4)), torch.tensor([0, 1, 2])


def tied_language_model() -> Data:
    model = Assembled(lambda m, x: m.out(torch.tanh(m.embed(x))).transpose(1, 2), embed=nn.Embedding(5, 4))
    model.out = nn.Linear(4, 5, bias=False)
    model.out.weight = model.embed.weight
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    return (
        model,
        nn.CrossEntropyLoss(weight=weights, ignore_index=2),
        torch.randint(5, (3, 4)),
        torch.randint(5, (3, 4)),
    )


def siamese() -> Data:
    model = Assembled(lambda m, x: m.head(torch.cat([m.twin(x), m.twin(x.flip(1))], 1)), twin=nn.Linear(4, 3))
    model.head = nn.Linear(6, 1)
    return model, nn.BCEWithLogitsLoss(), torch.randn(3, 4), torch.rand(3, 1)


def dropout() -> Data:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))
    return model, nn.MSELoss(reduction="sum"), torch.randn(4, 4), torch.randn(4, 2)


MODELS = (mlp, cnn, lstm, encoder, tied_language_model, siamese, dropout)


@pytest.mark.parametrize("make", MODELS)
def test_right_quantities_are_ok(make: Callable[[], Data]) -> None:
    result = bpk.verify(*make())
    assert result, result
    factors = {"KFAC", "KFLR", "KFRA"}  # have no definition here for tied tables
    assert {row.quantity for row in result.of(Verdict.OK)} >= {type(e).__name__ for e in every_extension()} - factors
    assert not result.wrong
    exact = [row for row in result.of(Verdict.OK) if "draws" not in row.note]
    assert all(row.relative is not None and row.relative < 1e-8 for row in exact), result


@pytest.mark.parametrize("make", [mlp, cnn])
def test_everything_is_compared(make: Callable[[], Data]) -> None:
    result = bpk.verify(*make())
    assert len(result.rows) == len(every_extension()) * len(list(make()[0].parameters()))
    assert len(result.of(Verdict.OK)) == len(result.rows), result


def test_converter() -> None:
    assert bpk.verify(*siamese(), E.BatchGrad(), E.KFRA(), E.DiagHessian(), use_converter=True)


# ---- what is wrong is found ------------------------------------------------------------------------------
def scaled(value: Any, factor: float) -> Any:
    """A field that is wrong by a factor."""
    if isinstance(value, list):
        return [value[0] * factor, *value[1:]]
    return value * factor if isinstance(value, Tensor) else lambda v: value(v) * factor


@pytest.mark.parametrize("extension", every_extension(), ids=str)
def test_every_wrong_quantity_is_found(extension: BackpropExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    right = type(extension).value
    factor = 0.5 if isinstance(extension, E.PCHMP) else 1.001
    monkeypatch.setattr(type(extension), "value", lambda self, uses: scaled(right(self, uses), factor))
    result = bpk.verify(*mlp(), extension)
    assert not result.ok
    assert len(result.wrong) == 4, result


@pytest.mark.parametrize("extension", [e for e in EXACT if not isinstance(e, E.KFRA)], ids=str)
def test_wrong_shapes_are_found(extension: BackpropExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    right = type(extension).value

    def wrong(self: BackpropExtension, uses: Any) -> Any:
        value = right(self, uses)
        return value[..., None] if isinstance(value, Tensor) else None

    monkeypatch.setattr(type(extension), "value", wrong)
    result = bpk.verify(*mlp(), extension)
    assert len(result.wrong) == 4, result


def test_too_many_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones alone were compared, as if more were too costly."""
    right = E.TokenGrad.value
    monkeypatch.setattr(E.TokenGrad, "value", lambda self, uses: torch.cat([right(self, uses)] * 2, 1))
    result = bpk.verify(*mlp(), E.TokenGrad())
    assert {row.note for row in result.wrong} == {"the field is of 2 tokens, its definition of 1"}, result
    assert len(result.wrong) == 4


def test_wrong_signs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn by what is checked, and were believed."""
    for module in (square_root, draws):
        monkeypatch.setattr(module, "random_signs", lambda *args: 1.5 * random_signs(*args))
    result = bpk.verify(*mlp(), E.DiagJTJMC())
    assert len(result.wrong) == 4 and "draws of an entry of the identity is" in result.wrong[0].note, result


def test_sparse_gradients() -> None:
    """They ended it with an error of torch's."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randint(5, (3, 2)), torch.tensor([0, 1, 1])
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagGGNExact())
    assert {row.verdict for row in result.rows} == {Verdict.REFUSED}, result
    assert "its gradient is sparse" in result.rows[0].note


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


class BrokenRule(Elementwise):
    error: type[Exception] = TypeError

    def jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        raise self.error("a mistake\nin the rule")


@pytest.fixture
def registered() -> Any:
    """Register rules for the length of a test."""
    rules = []

    def add(rule: Any) -> None:
        rules.append(bpk.register(rule))

    yield add
    for rule in rules:
        bpk.unregister(rule)


def test_wrong_rule_is_found(registered: Any) -> None:
    registered(Elementwise("x**2", Cube))
    model = nn.Sequential(nn.Linear(3, 4), Cube(), nn.Linear(4, 2))
    result = bpk.verify(model, nn.MSELoss(), torch.randn(3, 3), torch.randn(3, 2), E.BatchGrad(), E.DiagGGNExact())
    assert [(row.parameter, row.quantity) for row in result.wrong] == [
        ("0.weight", "DiagGGNExact"),
        ("0.bias", "DiagGGNExact"),
    ]
    assert result.wrong[0].note.startswith("entry [") and ": bpk " in result.wrong[0].note
    with pytest.raises(AssertionError, match="WRONG"):
        bpk.verify(model, nn.MSELoss(), torch.randn(3, 3), torch.randn(3, 2), E.DiagGGNExact(), raise_on_error=True)


@pytest.mark.parametrize("error", [TypeError, ValueError, NotImplementedError, RuntimeError])
def test_rule_that_raises_is_wrong(registered: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenRule, "error", error)
    registered(BrokenRule("x**3", Cube))
    model = nn.Sequential(nn.Linear(3, 4), Cube(), nn.Linear(4, 2))
    result = bpk.verify(model, nn.MSELoss(), torch.randn(3, 3), torch.randn(3, 2), E.DiagGGNExact())
    assert {row.note for row in result.wrong} == {f"{error.__name__}: a mistake in the rule"}


def test_missing_field_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(E.BatchGrad, "value", lambda self, uses: None)
    result = bpk.verify(*mlp(), E.BatchGrad())
    assert "no field" in result.wrong[0].note


def test_missing_field_is_wrong_whatever_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a parameter goes the generic way is no reason why it has no field; it was called refused."""
    monkeypatch.setattr(E.BatchGrad, "value", lambda self, uses: None)
    result = bpk.verify(Scaled(), nn.MSELoss(), torch.randn(3, 4), torch.randn(3, 2), E.BatchGrad())
    assert ["no field" in row.note for row in result.wrong] == [True] * 3, result


class Scaled(nn.Module):
    """A function uses a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale.exp()


# ---- what is not compared is said ------------------------------------------------------------------------
def test_mixed_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    result = bpk.verify(
        model, nn.CrossEntropyLoss(), torch.randn(4, 4), torch.tensor([0, 1, 1, 0]), E.BatchGrad(), E.KFLR()
    )
    assert not result.ok and not result.wrong
    assert {row.quantity for row in result.of(Verdict.UNCHECKED)} == {"BatchGrad"}
    assert "'1' is in training mode: call model.eval()" in result.rows[0].note
    assert "BatchNorm in training mode mixes samples" in result.of(Verdict.REFUSED)[0].note


class Centred(nn.Module):
    """A function that mixes samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x - x.mean(0))


SUMS = (E.DiagGGNExact, E.DiagGGNMC, E.DiagHessian, E.HMP, E.GGNMP, E.PCHMP)


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(3), Centred], ids=["BatchNorm1d", "function"])
def test_sums_where_samples_mix(norm: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), norm(), nn.Tanh(), nn.Linear(3, 2))
    data = (model, nn.CrossEntropyLoss(), torch.randn(4, 4), torch.tensor([0, 1, 1, 0]))
    result = bpk.verify(*data, *[extension() for extension in SUMS])
    assert not result.wrong, str(result)
    assert {row.quantity for row in result.of(Verdict.OK)} == {extension.__name__ for extension in SUMS}


@pytest.mark.parametrize("extension", [E.DiagGGNExact, E.DiagHessian, E.HMP], ids=lambda e: e.__name__)
def test_a_sum_of_samples_that_mix_is_not_taken_for_one_of_samples(extension: type, monkeypatch: Any) -> None:
    """Without the terms between samples, values are wrong, and `verify` says so."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    data = (model, nn.CrossEntropyLoss(), torch.randn(4, 4), torch.tensor([0, 1, 1, 0]))
    monkeypatch.setattr(bpk.plan.samples.whole_batch, "mixes", lambda record: False)
    monkeypatch.setattr(type(REGISTRY.find(model[1])), "mixing", lambda self, call: None)
    monkeypatch.setattr(Normalization, "residual", lambda self, call, wrts=(0,): Residual.ZERO)
    assert bpk.verify(*data, extension()).wrong


def test_batch_axis() -> None:
    model = Assembled(lambda m, x: m.out(m.rnn(x)[0]).flatten(0, 1), rnn=nn.GRU(3, 3), out=nn.Linear(3, 2))
    data = (model, nn.CrossEntropyLoss(), torch.randn(4, 3, 3), torch.randint(2, (12,)))
    assert bpk.verify(*data, E.BatchGrad(), E.DiagGGNExact(), batch_axis=1)
    result = bpk.verify(*data, E.BatchGrad(), E.DiagGGNExact())
    assert not result.wrong
    assert {row.note for row in result.rows if row.quantity == "BatchGrad"} == {
        "samples mix: entries of the prediction depend on several of them "
        "(is another axis than batch_axis= the batch axis?)"
    }
    assert {row.verdict for row in result.rows if row.quantity == "DiagGGNExact"} == {Verdict.OK}  # a sum has no axis


def test_nan() -> None:
    model, loss, x, y = mlp()
    x[1, 0] = torch.nan
    result = bpk.verify(model, loss, x, y, samples=4)
    assert not result.wrong, result
    assert "plain autograd gives NaN or infinity" in {row.note for row in result.of(Verdict.UNCHECKED)}


def test_no_second_derivative() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Hardsigmoid(), nn.Linear(4, 2))
    result = bpk.verify(model, nn.MSELoss(), torch.randn(3, 3), torch.randn(3, 2), E.BatchGrad(), E.HMP())
    assert {row.quantity for row in result.rows if row.verdict is Verdict.OK and row.parameter[0] == "0"} == {
        "BatchGrad"
    }
    assert "hardsigmoid_backward is not implemented" in result.of(Verdict.UNCHECKED)[0].note


class OfMyOwn(E.BatchGrad):
    """An extension that somebody wrote."""


def test_unknown_extension_unused_and_frozen_parameters() -> None:
    model = Assembled(lambda m, x: m.used(x), used=nn.Linear(4, 3), unused=nn.Linear(2, 2))
    model.used.bias.requires_grad_(False)
    result = bpk.verify(
        model, nn.CrossEntropyLoss(), torch.randn(3, 4), torch.tensor([0, 1, 2]), OfMyOwn(), E.Variance()
    )
    shown = [(row.parameter, row.verdict, row.note) for row in result.rows]
    unknown, unused = "no definition of this quantity is known here", "the loss does not depend on it"
    assert shown == [
        *((name, Verdict.UNCHECKED, unknown) for name in ("used.weight", "unused.weight", "unused.bias")),
        ("used.weight", Verdict.OK, ""),
        *((name, Verdict.UNCHECKED, unused) for name in ("unused.weight", "unused.bias")),
    ]


class Defined(E.BatchGrad):
    """An extension that says what it must be, in some form, of the rows that `value` gets."""

    def __init__(self, form: Form, value: Callable[[Tensor], Tensor], definition: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.form, self.of_rows, self.of_plain = form, value, definition

    def value(self, uses: Any) -> Any:
        return self.of_rows(super().value(uses))

    def definition(self, plain: PlainAutograd) -> Tensor:
        return self.of_plain(plain)


FORMS = {
    "number": (Form.NUMBER, lambda g: g.abs().sum(), lambda plain: plain.gradients.abs().sum()),
    "numbers": (Form.NUMBERS, lambda g: g.flatten(1).amax(1), lambda plain: plain.gradients.amax(1)),
    "root": (Form.ROOT, lambda g: g[None], lambda plain: torch.einsum("ni,nj->nij", *[plain.gradients] * 2)),
    "product": (Form.PRODUCT, lambda g: lambda v: 2 * v, lambda plain: 2 * plain.vector),
    "at least": (Form.BOUNDED_PRODUCT, lambda g: lambda v: 2 * v, lambda plain: torch.stack([plain.vector] * 2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_definitions_of_ones_own(form: str) -> None:
    """An unlisted extension that has a definition in its class is compared with it, in each form."""
    assert len(bpk.verify(*mlp(), Defined(*FORMS[form]), samples=3).of(Verdict.OK)) == 4
    kind, value, definition = FORMS[form]

    def twice(plain: PlainAutograd) -> Tensor:
        return 3 * definition(plain)

    assert len(bpk.verify(*mlp(), Defined(kind, value, twice)).wrong) == 4


@pytest.mark.parametrize("curvature", ["ggn_diagonals", "hessian_diagonals"])
def test_definitions_that_see_all_entries(curvature: str) -> None:
    """Sums over a parameter, of the GGN and of the Hessian; and how many entries are too many."""
    extension = (E.BatchDiagGGNExact if curvature == "ggn_diagonals" else E.BatchDiagHessian)()

    class Trace(type(extension)):  # type: ignore[misc]
        form = Form.NUMBERS

        def value(self, uses: Any) -> Tensor:
            return super().value(uses).flatten(1).sum(1)

        def definition(self, plain: PlainAutograd) -> Tensor:
            return getattr(plain, curvature).sum(1)

    assert len(bpk.verify(*mlp(), Trace()).of(Verdict.OK)) == 4
    few = bpk.verify(*mlp(), Trace(), passes=11)
    assert {row.parameter for row in few.of(Verdict.UNCHECKED)} <= {"0.weight"} and not few.wrong


def test_memory_limit_spreads_parameters() -> None:
    size = 4 * 12 * 8 / 2**30  # of the field of the largest parameter
    assert len(bpk.verify(*mlp(), E.BatchGrad(), memory=size).of(Verdict.OK)) == 4
    small = bpk.verify(*mlp(), E.BatchGrad(), memory=size / 2)
    assert [row.verdict for row in small.rows] == [Verdict.UNCHECKED, Verdict.OK, Verdict.UNCHECKED, Verdict.OK]
    assert "memory=" in small.rows[0].note
    wide = nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 2))
    result = bpk.verify(wide, nn.MSELoss(), torch.randn(3, 4), torch.randn(3, 2), E.KFRA(), memory=300**2 * 7 / 2**30)
    assert {(row.verdict, row.note) for row in result.rows} == {(Verdict.UNCHECKED, "it would take 0.0 GiB (memory=)")}


def test_costly_references_look_at_fewer_entries() -> None:
    result = bpk.verify(*mlp(), E.DiagHessian(), passes=8)
    assert result and [row.entries for row in result.rows] == [2, 2, 2, 2]
