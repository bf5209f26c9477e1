"""Recurrent layers: given states, all results, many columns, what is shared, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.recurrent import back as recurrent_back
from bpk.jacobians.recurrent import columns as recurrent_columns
from bpk.jacobians.recurrent.layer import RecurrentForward
from bpk.jacobians.recurrent.recurrent import Recurrent
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from tests.references.crosscheck import crosscheck
from tests.references.reference import Reference
from tests.references.symbolic_forwards import recurrent_step

F64 = torch.float64


class GivenLSTM(nn.LSTM):
    """Initial states one after the other, as examples give them."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return super().forward(x, (h, c))


class GivenLSTMCell(nn.LSTMCell):
    """The same for a cell."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return super().forward(x, (h, c))


def rule_of(layer: type[nn.Module]) -> Recurrent:
    rule = REGISTRY.find(layer)
    assert isinstance(rule, Recurrent)
    return rule


GIVEN = [
    (nn.RNN, case(nn.RNN, 2, 3, bidirectional=True, batch_first=True, shapes=((2, 3, 2), (2, 2, 3)))),
    (nn.GRU, case(nn.GRU, 2, 2, num_layers=2, bias=False, shapes=((3, 2, 2), (2, 2, 2)))),
    (nn.LSTM, case(GivenLSTM, 2, 3, proj_size=2, shapes=((2, 3, 2), (1, 3, 2), (1, 3, 3)))),
    (nn.LSTM, case(GivenLSTM, 1, 2, bidirectional=True, bias=False, shapes=((3, 2, 1), (2, 2, 2), (2, 2, 2)))),
    (nn.LSTMCell, case(GivenLSTMCell, 2, 2, shapes=((3, 2), (3, 2), (3, 2)))),
]


@pytest.mark.parametrize(("layer", "example"), [pytest.param(*g, id=str(g[1])) for g in GIVEN])
def test_given_states(layer: type[nn.Module], example: Example) -> None:
    """Products with respect to initial states, through every result."""
    assert check_rule(rule_of(layer), [example], [F64]).checks > 100


@pytest.mark.parametrize("layer", [nn.RNNCell, nn.LSTMCell, nn.GRU, nn.LSTM])
def test_arguments_by_name_in_any_order(layer: Any) -> None:
    torch.manual_seed(0)
    x, y, is_lstm = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,)), issubclass(layer, (nn.LSTM, nn.LSTMCell))
    model, loss_fn = nn.ModuleList([nn.Linear(3, 3), layer(3, 3)]).double(), bpk.extend(nn.CrossEntropyLoss())
    found = []
    for named in (False, True):
        first, last = net = bpk.extend(copy.deepcopy(model))
        h, given = (t if isinstance(last, nn.RNNCellBase) else t[None] for t in (first(x), x.sin()))
        state = (h, h.cos()) if is_lstm else h
        with bpk.backpack(E.BatchGrad(), E.DiagHessian()):
            out = last(hx=state, input=given) if named else last(given, state)
            loss_fn((out if isinstance(out, Tensor) else out[0]).reshape(4, 3), y).backward()
        found.append([(p.grad_batch, p.diag_h) for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_results_of_which_some_are_used() -> None:
    example = case(nn.LSTM, 2, 2, num_layers=2, bias=False, shape=(3, 2, 2))
    for used in ((1,), (2,), (0, 2), (1, 2)):
        check_rule(rule_of(nn.LSTM), [example], [F64], used=used)


CELLS = [
    case(nn.RNNCell, 1, 2, shapes=((2, 1), (2, 2))),
    case(nn.GRUCell, 1, 1, shapes=((1, 1), (1, 1))),
    case(GivenLSTMCell, 1, 1, shapes=((1, 1), (1, 1), (1, 1))),
]


@pytest.mark.parametrize("example", [pytest.param(e, id=str(e)) for e in CELLS])
def test_cells_against_sympy(example: Example) -> None:
    torch.manual_seed(0)
    layer = example.build().double()
    rule = rule_of(nn.LSTMCell) if isinstance(layer, nn.LSTMCell) else rule_of(type(layer))
    assert crosscheck(rule, layer, example.inputs(F64), recurrent_step) > 30


# ---- overrides against the generic way -----------------------------------------------------------------
class Generic(RecurrentForward, Autodiff):
    """The same layers with products by automatic differentiation of their forward."""


def call_of(rule: Recurrent, layer: nn.Module, *inputs: Tensor, used: Sequence[int] = (0,)) -> Call:
    torch.manual_seed(1)
    return Call.of(layer.double(), *inputs, params=rule.params_of(layer), rule=rule, used=used)


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.LSTM(2, 3, num_layers=2, batch_first=True),
    lambda: nn.LSTM(2, 3, proj_size=2, batch_first=True),
    lambda: nn.GRU(2, 3, bidirectional=True, batch_first=True),
    lambda: nn.RNN(2, 3, num_layers=2, batch_first=True),
]


@pytest.mark.parametrize("make", LAYERS, ids=[str(make()) for make in LAYERS])
def test_generic_way_agrees(make: Callable[[], nn.Module]) -> None:
    layer = make()
    rule = rule_of(type(layer))
    generic = Generic(type(layer), cell=rule.cell)
    states = 3 if isinstance(layer, nn.LSTM) else 2
    call = call_of(rule, layer, torch.randn(3, 4, 2, dtype=F64), used=range(states))
    mat, grad = torch.randn(2, *call.output.shape, dtype=F64), torch.randn_like(call.output)
    wrts: list[Wrt] = [0, *call.params]
    tangents = {w: torch.randn(2, *call.shape_of(w), dtype=F64) for w in wrts}
    with torch.no_grad():
        bent = [r.residual_mat_prod(call, grad, tangents) for r in (rule, generic)]
        for wrt in wrts:
            for product, given in (("jac_t_mat_prod", mat), ("jac_mat_prod", tangents[wrt])):
                found, expected = (getattr(r, product)(call, given, wrt) for r in (rule, generic))
                torch.testing.assert_close(found, expected)
            torch.testing.assert_close(bent[0][wrt], bent[1][wrt])


# ---- many columns --------------------------------------------------------------------------------------
def columns_of_positions(call: Call, classes: int) -> Tensor:
    """Columns that live at one position each, in an order that mixes positions."""
    n, t, width = call.output.shape
    mat = torch.zeros(classes, t, n, t, width, dtype=F64)
    for step in range(t):
        mat[:, step, :, step] = torch.randn(classes, n, width, dtype=F64)
    return mat.flatten(0, 1)


@pytest.mark.parametrize("columns", [1 << 22, 200], ids=["at once", "in pieces"])
@pytest.mark.parametrize("make", LAYERS, ids=[str(make()) for make in LAYERS])
def test_many_columns(make: Callable[[], nn.Module], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares by matrices over time, and recurrences in pieces that end early, against rows of single columns."""
    monkeypatch.setattr(recurrent_columns, "COLUMNS", columns)
    layer = make()
    rule = rule_of(type(layer))
    torch.manual_seed(2)
    x = torch.randn(2, 4, 2, dtype=F64)
    for weights in (None, torch.randn(20, 2, dtype=F64)):
        call, fresh = call_of(rule, layer, x), call_of(rule, layer, x)
        mat = columns_of_positions(call, 5)
        blocks = list(mat.split(12))
        with torch.no_grad():
            single = [rule.jac_t_mat_prod(fresh, one[None], 0)[0] for one in mat]
            found = torch.cat([rule.jac_t_mat_prod(call, block, 0) for block in blocks])
            torch.testing.assert_close(found, torch.stack(single))
            for param in call.params:
                rows = torch.cat([rule.jac_t_mat_prod(fresh, one[None], param, False) for one in mat])
                torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, param, False), rows)
                torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, param), rows.sum(1))
                expected = Rule.squared_sum(rule, fresh, mat, param, weights, True)
                for per_sample in (False, True):
                    squares = rule.squared_sum_of_blocks(call, blocks, param, weights, per_sample)
                    assert squares is not None
                    torch.testing.assert_close(squares, expected if per_sample else expected.sum(0))


def test_one_recurrence_serves_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every extension of first order, the input and all parameters together go back once through each scan."""
    pulls: list[Any] = []
    pull = recurrent_back.pull

    def counted(trace: Any, *args: Any) -> Any:
        pulls.append(trace)
        return pull(trace, *args)

    monkeypatch.setattr(recurrent_back, "pull", counted)
    model = bpk.extend(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 3, num_layers=2, batch_first=True)))
    lossfunc = bpk.extend(nn.MSELoss())
    x, y = torch.randn(3, 4, 2), torch.randn(3, 4, 3)
    with bpk.backpack(E.BatchGrad(), E.Variance(), E.BatchL2Grad(), E.SumGradSquared()):
        lossfunc(model(x)[0], y).backward()
    assert len(pulls) == 2


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.processor("elsewhere, all columns go at once")
def test_columns_go_back_once(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a loss over positions, in several rounds: none goes back again for its squares, none is torn off."""
    pulled: list[tuple[int, int]] = []
    pull = recurrent_back.pull

    def counted(trace: Any, dy: Tensor, *args: Any) -> Any:
        pulled.append((dy.shape[0], dy.shape[1:3].numel()))
        return pull(trace, dy, *args)

    monkeypatch.setattr(recurrent_back, "pull", counted)
    n, t, classes = 3, 5, 7
    model = bpk.extend(Words(layer(2, 3, batch_first=True), classes).double())
    lossfunc = bpk.extend(nn.CrossEntropyLoss())
    tokens, y = torch.randint(classes, (n, t)), torch.randint(classes, (n * t,))
    fields = []
    for columns in (100, 16):  # 16: two positions at a time
        pulled = []
        with bpk.backpack(E.DiagGGNExact(), chunk_size=columns):
            lossfunc(model(tokens), y).backward()
        pulled = [entry for entry in pulled if entry[1] > 3 * n]  # not the probe that finds the samples
        assert sum(rows for _, rows in pulled) == classes * t * n
        fields.append([p.diag_ggn_exact.clone() for p in model.parameters()])
    assert sorted(pulled) == [(2, 2 * classes * n), (4, 2 * classes * n), (5, classes * n)]
    torch.testing.assert_close(fields[0], fields[1])


class Words(nn.Module):
    """A prediction for every word."""

    def __init__(self, layer: nn.Module, classes: int) -> None:
        super().__init__()
        self.table, self.layer, self.last = nn.Embedding(classes, 2), layer, nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.table(x))[0]).flatten(0, 1)


# ---- in models -------------------------------------------------------------------------------------------
class Tagger(nn.Module):
    """A prediction for every step."""

    def __init__(self, layer: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0]).transpose(1, 2)


def tagged(layer: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Tagger(layer).double(), torch.randn(3, 4, 2, dtype=F64), torch.randint(2, (3, 4))


def test_subsampling() -> None:
    model, x, y = tagged(nn.LSTM(2, 3, batch_first=True))
    ref = Reference(model, (x,), lambda pred: nn.functional.cross_entropy(pred, y))
    model, lossfunc = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(subsampling=[2, 0]), E.BatchDiagGGNExact(subsampling=[2, 0])):
        lossfunc(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name)[[2, 0]])
        torch.testing.assert_close(p.diag_ggn_exact_batch, ref.diag_ggn_batch(name)[[2, 0]])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_hessian_diagonals_in_single_precision(layer: Any) -> None:
    """Their many small residuals are not taken for rounding."""
    model, x, y = Tagger(layer(6, 8, batch_first=True), 8), torch.randn(8, 5, 6), torch.randint(2, (8, 5))
    found = []
    for dtype in (torch.float32, F64):
        copied, lossfunc = bpk.extend(copy.deepcopy(model).to(dtype)), bpk.extend(nn.CrossEntropyLoss())
        with bpk.backpack(E.DiagHessian()):
            lossfunc(copied(x.to(dtype)), y).backward()
        found.append([p.diag_h.double() for p in copied.parameters()])
    for single, double in zip(*found, strict=True):
        assert (single - double).norm() < 3e-6 * double.norm()


class Centred(nn.Module):
    """Equal steps, what comes back to which adds up to zero: squares of the GGN are rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.RNN(6, 5, nonlinearity="relu", batch_first=True), nn.InstanceNorm1d(5)
        self.rnn.weight_hh_l0.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.rnn(x)[0].transpose(1, 2)).flatten(1)


@pytest.mark.parametrize("extension", [E.DiagGGNExact, E.BatchDiagGGNExact])
def test_squares_are_not_negative(extension: Any) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Centred()), bpk.extend(nn.CrossEntropyLoss())
    x = torch.rand(4, 1, 6).expand(4, 3, 6) + 1
    with bpk.backpack(extension()):
        loss_fn(model(x), torch.arange(4)).backward()
    for p in model.rnn.parameters():
        assert bool((getattr(p, extension.field) >= 0).all())


def test_gradient_of_the_variance() -> None:
    """`create_graph`: what the extension returns can be differentiated."""
    model, x, y = tagged(nn.GRU(2, 3, batch_first=True))
    model, lossfunc = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    params = dict(model.named_parameters())
    with bpk.backpack(E.BatchGrad()):
        lossfunc(model(x), y).backward(create_graph=True)
    total = sum((p.grad_batch.square().sum() for p in params.values()), torch.zeros(()))
    found = torch.autograd.grad(total, list(params.values()))

    def of_rows(values: dict[str, Tensor]) -> Tensor:
        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            pred = torch.func.functional_call(model, values, (x[None],))
            return nn.functional.cross_entropy(pred, y[None]) / 3

        rows = [torch.func.grad(loss)(values, x[n], y[n]) for n in range(3)]
        return sum((g.square().sum() for row in rows for g in row.values()), torch.zeros(()))

    with bpk.disable():
        expected = torch.func.grad(of_rows)({name: p.detach() for name, p in params.items()})
    for (name, g), e in zip(zip(params, found, strict=True), expected.values(), strict=True):
        torch.testing.assert_close(g, e, msg=name)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_output_changed_in_place(layer: Any) -> None:
    """Where autograd allows it, what is known of the output is no longer relied on."""
    module, rule = layer(2, 3), rule_of(layer)
    call = call_of(rule, module, torch.randn(4, 3, 2, dtype=F64))
    fresh = call_of(rule, module, call.inputs[0].transpose(0, 1))
    call.output.relu_()
    mat = torch.randn(1, *call.output.shape, dtype=F64)
    with torch.no_grad():
        for wrt in (0, *call.params):
            torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, wrt), rule.jac_t_mat_prod(fresh, mat, wrt))


# ---- refusals ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_an_input_without_batch_axis_is_refused(extension: Any) -> None:
    layer, last, lossfunc = bpk.extend(nn.GRU(2, 3)), bpk.extend(nn.Linear(3, 2)), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(UnsupportedLayer, match="no batch axis"), bpk.backpack(extension()):
        lossfunc(last(layer(torch.randn(4, 2))[0]), torch.tensor([0, 1, 1, 0])).backward()
