"""`verify` of Kronecker factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization as parametrize

import bpk
from bpk import extensions as E
from bpk.verification import Verdict
from tests.bpk.verification.test_verify_models import CROSS_ENTROPY, Model, X, Y, tokens


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


class DoubledLinear(nn.Linear):
    """What users derive: the factors are those of the product inside."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh() * 2


def derived_linear() -> Any:
    model = Model(lambda m, x: m.c(m.a(x)), a=DoubledLinear(4, 4), c=nn.Linear(4, 3))
    return model, CROSS_ENTROPY, torch.randn(X), Y


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
    "derived linear": derived_linear,
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


class Scaled(nn.Module):
    """Cannot be turned around: a value cannot be put in its place."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("how", [lambda m: prune.identity(m, "bias"), lambda m: parametrize(m, "bias", Scaled())])
def test_biases_that_are_computed(how: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    how(model[2])
    result = bpk.verify(model, CROSS_ENTROPY, torch.randn(X), Y, E.KFLR(), raise_on_error=True)
    assert {row.verdict for row in result.rows} == {Verdict.OK}


class Noisy(nn.Linear):
    """Its weight has noise in training mode, and another name."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__(d, k)
        self.mean = nn.Parameter(self.weight.detach().clone())
        del self.weight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.mean + 0.1 * torch.randn_like(self.mean) if self.training else self.mean


def test_weights_that_are_properties() -> None:
    model = nn.Sequential(Noisy(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    result = bpk.verify(model, CROSS_ENTROPY, torch.randn(X), Y, E.BatchGrad(), E.DiagGGNExact(), E.KFLR())
    assert {row.verdict for row in result.rows} == {Verdict.OK}, str(result)


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


def test_a_tied_table_without_curvature() -> None:
    """A loss that is linear in its predictions has no GGN: the nearest product is zero."""
    model, _, x, _ = tied_table()
    shape = model(x).shape
    assert bpk.verify(model, nn.L1Loss(), x, torch.randn(shape), E.KFLR(), raise_on_error=True)


@pytest.mark.parametrize("tied", ["weight_hh_l0", "bias_hh_l0"])
def test_parameters_under_two_names_of_one_layer(tied: str) -> None:
    """A bias of the layer stands for one name's output then: it had been taken for that of all uses."""
    model, loss, x, y = recurrent(nn.RNN(4, 4, batch_first=True))
    setattr(model.a, tied, getattr(model.a, tied.replace("hh", "ih")))
    result = bpk.verify(model, loss, x, y, E.KFLR(), E.EKFLR(), E.BatchKFLR())
    assert not [row for row in result.rows if row.verdict is Verdict.WRONG], result
    assert [row for row in result.rows if row.verdict is Verdict.UNCHECKED], result


def test_factors_of_a_weight_under_two_names_of_one_layer() -> None:
    """`A` sums over uses, `G` is the block of one bias that is added to the outputs of both."""
    model, _, x, _ = recurrent(nn.RNN(4, 4, batch_first=True))
    model.a.weight_hh_l0 = model.a.weight_ih_l0
    bpk.extend(model.double())
    loss_fn, x = bpk.extend(nn.MSELoss(reduction="sum")), x.double()
    with bpk.backpack(E.KFLR()):
        loss_fn(model(x), torch.zeros(3, 3).double()).backward()

    seen = []

    def by_hand(bias: Tensor) -> Tensor:
        h, states, layer = torch.zeros(3, 4).double(), [], model.a
        for step in x.unbind(1):
            seen.extend([step, h])
            products = [F.linear(value, layer.weight_ih_l0, bias) for value in (step, h)]
            h = torch.tanh(products[0] + products[1] + layer.bias_ih_l0 + layer.bias_hh_l0)
            states.append(h)
        return model.b(torch.stack(states, 1).sum(1))

    jacobian = torch.autograd.functional.jacobian(by_hand, torch.zeros(4).double())
    moment = sum((value.T @ value for value in seen), torch.zeros(4, 4).double()) / 3
    expected = [2 * torch.einsum("nci,ncj->ij", jacobian, jacobian), moment]
    for factor, value in zip(model.a.weight_ih_l0.kflr, expected, strict=True):
        torch.testing.assert_close(factor, value)


class Attending(nn.Module):
    """Attention of one head: a bias of all keys changes no weight, so that its curvature is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(((self.query(x) @ self.key(x).mT).softmax(-1) @ x).mean(1))
        return out


def test_curvature_that_is_rounding() -> None:
    result = bpk.verify(Attending(), CROSS_ENTROPY, torch.randn(3, 4, 3), Y % 2, E.EKFLR(), E.KFRA(), E.BatchKFLR())
    assert result.of(Verdict.OK) and not result.wrong, result.summary()


def test_rows_in_another_order() -> None:
    """Of some samples, the input factor is that of their rows: where these are not in order, it is not compared."""
    model = Model(lambda m, x: m.b(m.a(x.flip(0)).flip(0).tanh()), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    result = bpk.verify(model, CROSS_ENTROPY, torch.randn(X), Y, E.KFLR(subsampling=[0]), E.BatchKFLR())
    assert {row.parameter for row in result.of(Verdict.UNCHECKED)} == {"a.weight"} and not result.wrong, (
        result.summary()
    )


class Numbers(nn.Module):
    """Single numbers: a scalar, a matrix that functions multiply with, and a table tied to a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.matrix = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([[1.3]]))
        self.table, self.linear, self.head = nn.Embedding(1, 1), nn.Linear(1, 1), nn.Linear(1, 3)
        self.linear.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear((x[:, :1] @ self.matrix).tanh() * self.scalar) + self.table(
            torch.zeros(len(x), dtype=torch.long)
        )
        out: Tensor = self.head(x.tanh())
        return out


def test_single_numbers() -> None:
    exts = E.KFLR(), E.BatchKFLR(), E.EKFLR(), E.PCHMP()
    result = bpk.verify(Numbers(), CROSS_ENTROPY, torch.randn(X), Y, *exts)
    ok = {(row.parameter, row.quantity) for row in result.of(Verdict.OK)}
    assert {("matrix", "KFLR"), ("scalar", "PCHMP")} <= ok and not result.wrong, result.summary()


# ---- functions that layers call ---------------------------------------------------------------------------
class Functional(Model):
    """Weights of its own, for functions that layers call."""

    def __init__(self, function: Callable[..., Tensor], weight: tuple[int, ...], **options: Any) -> None:
        super().__init__(lambda m, x: function(x, m.weight, m.bias, **options).tanh().flatten(2).mean(2))
        outputs = weight[1] if "transpose" in function.__name__ else weight[0]
        self.weight, self.bias = (nn.Parameter(torch.randn(s) / 2) for s in (weight, (outputs,)))


FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Functional(F.conv2d, (3, 2, 2, 2), stride=2),
    "with groups": lambda: Functional(F.conv2d, (4, 1, 2, 2), groups=2),
    "transposed": lambda: Functional(F.conv_transpose2d, (2, 3, 2, 2)),
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_layers(make: Callable[[], nn.Module]) -> None:
    """They have the factors, and the eigenbases, of the layer that calls them."""
    torch.manual_seed(0)
    result = bpk.verify(make(), CROSS_ENTROPY, torch.randn(3, 2, 5, 5), Y, E.KFLR(), E.KFAC(), E.EKFLR(), E.EKFAC())
    assert len(result.of(Verdict.OK)) == len(result.rows) == 8, result


def test_the_last_map_of_attention_is_called_by_itself() -> None:
    """Its own bias is added once, and its factors are those of two layers."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Model(lambda m, x: m.b((m.a(x, x, x)[0] + m.a.out_proj(x)).mean(1)), a=layer, b=nn.Linear(4, 3))
    result = bpk.verify(model, CROSS_ENTROPY, torch.randn(3, 5, 4), Y, E.KFLR(), E.EKFLR(), E.BatchGrad())
    assert {row.parameter for row in result.of(Verdict.UNCHECKED)} == {"a.out_proj.weight"} and not result.wrong, result


def attention_and_linear(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x, x, x)[0].tanh()).mean(1)


def recurrent_and_linear(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x[:, 1], m.a(x[:, 0])))


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_weight_of_a_layer_that_another_layer_has_as_well(kind: str) -> None:
    """A linear layer shares one weight of several: what happens inside of the other layer is not known then."""
    torch.manual_seed(0)
    if kind == "attention":
        layer: Any = nn.MultiheadAttention(4, 2, batch_first=True)
        model, name = Model(attention_and_linear, a=layer, b=nn.Linear(4, 4)), "a.out_proj.weight"
        model.b.weight = layer.out_proj.weight
    else:
        layer = nn.RNNCell(4, 4)
        model, name = Model(recurrent_and_linear, a=layer, b=nn.Linear(4, 4)), "a.weight_hh"
        model.b.weight = layer.weight_hh
    result = bpk.verify(model, CROSS_ENTROPY, torch.randn(3, 2, 4), Y, E.KFLR(), E.EKFLR(), E.KFAC(), E.BatchGrad())
    assert {row.parameter for row in result.of(Verdict.UNCHECKED)} == {name} and not result.wrong, result
