"""Per sample means per sample: also where the batch axis is moved or merged, or as long as another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.references.compare import Assembled, check, rand

N = 3
LENGTHS = [2, 3]
"""Of time: with as many steps as samples, only the graph tells them apart."""


def time_first(m: Assembled, x: Tensor) -> Tensor:
    """`[N, T, D]`, but the layers see `[T, N, D]`."""
    z = m.second(m.act(m.first(x.transpose(0, 1))))
    return z.transpose(0, 1).mean(1)


def last_step(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(x.transpose(0, 1))))[-1]


def time_first_inside(m: Assembled, x: Tensor) -> Tensor:
    z = m.first(x).transpose(0, 1) * 2
    return m.second(m.act(z)).sum(0)


def batch_in_the_middle(m: Assembled, x: Tensor) -> Tensor:
    z = m.act(m.first(x)).reshape(*x.shape[:2], 2, 2).permute(2, 0, 1, 3)  # [2, N, T, 2]
    return m.second(z.reshape(2, *x.shape[:2], 2)).permute(1, 0, 2, 3).flatten(1)[:, :3]


def moved_in_front_of_a_softmax(m: Assembled, x: Tensor) -> Tensor:
    z = torch.softmax(m.first(x.transpose(0, 1)), 0)
    return (m.second(z) * torch.arange(1, len(z) + 1)[:, None, None]).sum(0)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize(
    "forward", [time_first, last_step, time_first_inside, batch_in_the_middle, moved_in_front_of_a_softmax]
)
def test_moved_batch_axis(forward: Callable[[Assembled, Tensor], Tensor], steps: int) -> None:
    torch.manual_seed(0)
    middle = forward is batch_in_the_middle
    second = nn.Linear(2, 2) if middle else nn.Linear(4, 3)
    model = Assembled(forward, first=nn.Linear(2, 4), act=nn.Tanh(), second=second)
    check(model, rand(N, steps, 2), factors=False)


@pytest.mark.parametrize("steps", LENGTHS)
def test_second_pass_uses_what_was_found(steps: int) -> None:
    """The search is done once for a form of graph; new data must see the same axes."""
    torch.manual_seed(0)
    model = Assembled(time_first, first=nn.Linear(2, 4), act=nn.ReLU(), second=nn.Linear(4, 3)).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(3):
        x, y = rand(N, steps, 2), torch.randint(3, (N,))
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            loss_fn(model(x), y).backward()
        for p in model.parameters():
            rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]), p)[0] / N for n in range(N)]
            torch.testing.assert_close(p.grad_batch, torch.stack(rows))


def flat_rows_first(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(x))).reshape(-1, 3)


def flat_steps_first(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(x))).transpose(0, 1).reshape(-1, 3)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("forward", [flat_rows_first, flat_steps_first])
def test_loss_on_flattened_predictions(forward: Callable[[Assembled, Tensor], Tensor], steps: int) -> None:
    """A loss on `[N T, C]` gives what the same loss gives on `[N, C, T]`."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(2, 4), "act": nn.Tanh(), "second": nn.Linear(4, 3)}
    flat = Assembled(forward, **layers).double()
    x, y = rand(N, steps, 2), torch.randint(3, (N, steps))
    fields = {}
    exts = (E.BatchGrad, E.Variance, E.DiagGGNExact, E.BatchDiagGGNExact, E.DiagHessian, E.BatchDiagHessian, E.KFLR)
    for kind in ("flat", "apart"):
        model = flat if kind == "flat" else Assembled(lambda m, z: m.second(m.act(m.first(z))).mT, **layers).double()
        target = y if kind == "apart" else y.flatten() if forward is flat_rows_first else y.T.flatten()
        model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
        with bpk.backpack(*[e() for e in exts]):
            loss_fn(model(x), target).backward()
        fields[kind] = [[getattr(p, e().savefield) for e in exts] for p in model.parameters()]
    for found, expected in zip(fields["flat"], fields["apart"], strict=True):
        torch.testing.assert_close(found, expected)


def mix(m: Assembled, x: Tensor) -> Tensor:
    z = m.first(x)
    return m.second(z - z.mean(0))


def test_mixing_function_warns_first_order_and_is_refused_by_sample() -> None:
    model = Assembled(mix, first=nn.Linear(2, 4), second=nn.Linear(4, 3)).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    x, y = rand(N, 2), torch.randint(3, (N,))
    with pytest.warns(UserWarning, match="Rows are not samples"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    with pytest.raises(NotImplementedError, match="mixes samples"), bpk.backpack(E.BatchDiagGGNExact()):
        loss_fn(model(x), y).backward()


class Positions(nn.Module):
    """Embeddings of tokens `[N, T]` and of positions `[T]`, which all samples share."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(5, 4), nn.Embedding(steps, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        here = self.position(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.token(x) + here)).mean(1)


@pytest.mark.parametrize("steps", LENGTHS)
def test_layer_without_a_batch_axis(steps: int) -> None:
    torch.manual_seed(0)
    check(Positions(steps), torch.randint(5, (N, steps)), factors=False)


def test_flattened_predictions_of_an_embedding_alone() -> None:
    """Tokens `[N, T]` have a batch axis, although every row of the only layer feeds several rows of the loss."""
    torch.manual_seed(0)
    table = nn.Embedding(5, 3)
    apart = Assembled(lambda m, x: m.head(torch.tanh(m.table(x))).mT, table=table, head=nn.Linear(3, 5))
    flat = Assembled(lambda m, x: m.head(torch.tanh(m.table(x))).flatten(0, 1), table=table, head=apart.head)
    x, y = torch.randint(5, (N, 2)), torch.randint(5, (N, 2))
    found = []
    for model, target in ((apart, y), (flat, y.flatten())):
        model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.CrossEntropyLoss())
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            loss_fn(model(x), target).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class LanguageModel(Positions):
    """Predictions `[N T, C]`."""

    def forward(self, x: Tensor) -> Tensor:
        here = self.position(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.token(x) + here)).view(-1, 3)


@pytest.mark.parametrize("steps", LENGTHS)
def test_positions_and_flattened_predictions(steps: int) -> None:
    torch.manual_seed(0)
    flat, x, y = LanguageModel(steps).double(), torch.randint(5, (N, steps)), torch.randint(3, (N, steps))
    model, loss_fn = bpk.extend(flat), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(), E.KFLR(), E.DiagGGNExact(), E.SqrtGGNExact()):
        loss_fn(model(x), y.flatten()).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n]) / N, p)[0] for n in range(N)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))
        torch.testing.assert_close(p.diag_ggn_exact, p.sqrt_ggn_exact.square().sum((0, 1)))
    assert [len(f) for f in model.token.weight.kflr] == [4, 5]  # a layer with factors, not a parameter of functions


class PositionTable(nn.Module):
    """A network of a table of positions `[T, 3]`, or one of weights (`hyper`), which all samples share."""

    def __init__(self, steps: int, kind: str) -> None:
        super().__init__()
        hyper = kind == "weights"
        self.network, self.head = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), nn.Linear(4, 3)
        table = torch.randn(4 if hyper else steps, 3)
        self.table = nn.Parameter(table) if kind == "parameters" else nn.Buffer(table)
        self.hyper = hyper

    def forward(self, x: Tensor) -> Tensor:
        here = self.network(self.table)
        return self.head(torch.tanh(x @ here if self.hyper else x + here))


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("kind", ["positions", "parameters", "weights"])
@pytest.mark.parametrize("steps_first", [False, True], ids=["samples first", "steps first"])
@pytest.mark.parametrize("steps", [2, 5, 6])
def test_a_network_of_a_table_and_flattened_predictions(steps: int, steps_first: bool, kind: str) -> None:
    torch.manual_seed(0)
    model, x = PositionTable(steps, kind).double(), torch.randn(N, steps, 4).double()
    model, loss_fn, y = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), torch.randint(3, (N, steps))
    with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
        z, target = (model(x).transpose(0, 1), y.T) if steps_first else (model(x), y)
        loss_fn(z.flatten(0, 1), target.flatten()).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(loss_fn(model(x[n]), y[n]) / N, p)[0] for n in range(N)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))
        assert p.diag_ggn_exact_batch.shape == p.grad_batch.shape


def test_positive_curvature_through_a_function_that_joins_rows_is_refused() -> None:
    """Its residual would have to be made positive for all rows of a sample together."""

    def join(m: Assembled, x: Tensor) -> Tensor:
        z = m.first(x.flatten(0, 1)).unflatten(0, (-1, 2)).softmax(1)
        return m.second(z.flatten(0, 1)).reshape(len(x), 2, 3).sum(1)

    model = Assembled(join, first=nn.Linear(2, 4), second=nn.Linear(4, 3)).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(NotImplementedError, match="PCHMP cannot pass"), bpk.backpack(E.PCHMP()):
        loss_fn(model(rand(N, 2, 2)), torch.randint(3, (N,))).backward()


@pytest.mark.parametrize(("t", "n"), [(3, 6), (6, 3), (2, 4), (4, 2)])
def test_time_first_where_steps_mix(t: int, n: int) -> None:
    """No layer has the samples in front: they are found as an axis of the data."""
    torch.manual_seed(0)
    first, last, loss_fn = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.CrossEntropyLoss()
    model = bpk.extend(nn.ModuleList([first, last]))
    x, y = torch.randn(t, n, 3).double(), torch.randint(2, (t, n))

    def logits(x: Tensor) -> Tensor:
        return model[1](torch.tanh(model[0](x)).cumsum(0)).flatten(0, 1)

    with bpk.backpack(E.BatchGrad()):
        bpk.extend(loss_fn)(logits(x), y.flatten()).backward()
    for k in range(n):
        loss = loss_fn(logits(x[:, k : k + 1]), y[:, k]) / n
        expected = torch.autograd.grad(loss, first.weight)[0]
        torch.testing.assert_close(first.weight.grad_batch[k], expected)


class TwoInputs(nn.Module):
    """Rows of both inputs, one below the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat([self.layers(x) for x in inputs])


@pytest.mark.parametrize("n", [2, 3])
def test_rows_of_two_inputs_or_calls_are_samples(n: int) -> None:
    """As many as the loss has rows: nobody says that row `k` of one belongs to row `k` of the other."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(TwoInputs().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = rand(2 * n, 2), torch.randint(3, (2 * n,))
    p = model.layers[0].weight
    expected = [torch.autograd.grad(loss_fn(model(x[k : k + 1]), y[k : k + 1]), p)[0] / (2 * n) for k in range(2 * n)]
    for out in (lambda: model(x[:n], x[n:]), lambda: torch.cat([model(x[:n]), model(x[n:])])):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(out(), y).backward()
        torch.testing.assert_close(p.grad_batch, torch.stack(expected))


class OfFunctions(nn.Module):
    """Products with parameters of a list, on an input that gets an axis in front: no layer is called at all.

    Results may be those of two branches, in a tuple or by name.
    """

    def __init__(self, depth: int, bias: bool, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        sizes = [*[3] * depth, 2]
        shapes = list(zip(sizes[1:], sizes, strict=False))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(out)) for out, _ in shapes])
        self.bias, self.back = bias, back

    def forward(self, x: Tensor, form: str = "tensor") -> Any:
        y = x[None]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            y = F.linear(y, weight, bias if self.bias else None).tanh()
        y = self.back(y)
        return {"tensor": y, "tuple": (y, y * 2), "name": {"logits": y}}[form]


BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda y: y[0],
    "sum": lambda y: y.sum(0),
    "mean": lambda y: y.mean(0),
    "squeeze": lambda y: y.squeeze(0),
}


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("back", BACK)
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_functions_alone_have_the_samples_that_the_model_was_given(back: str, depth: int, bias: bool, n: int) -> None:
    """No recorded layer says what the model was given: the nodes of its results do."""
    torch.manual_seed(0)
    model = bpk.extend(OfFunctions(depth, bias, BACK[back]).double())
    loss_fn, x, y = bpk.extend(nn.MSELoss()), torch.randn(n, 3).double(), torch.randn(n, 2).double()
    params = [*model.weights, *(model.biases if bias else ())]
    for form, key in {"tensor": ..., "tuple": 0, "name": "logits"}.items():
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            loss_fn(model(x, form)[key], y).backward()
        for p in params:
            with bpk.disable():
                losses = [(model(x[k : k + 1]) - y[k : k + 1]).square().mean() / n for k in range(n)]
                expected = torch.stack([torch.autograd.grad(loss, p)[0] for loss in losses])
            torch.testing.assert_close(p.grad_batch, expected)
            assert p.diag_ggn_exact.shape == p.shape


class DeadInside(nn.Module):
    """An encoder, time first, whose inner layers get no gradient: a ReLU is zero everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0)
        nn.init.constant_(layer.linear1.bias, -100.0)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(2), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.first(x).transpose(0, 1)).transpose(0, 1)[..., 0]


@pytest.mark.parametrize("steps", LENGTHS)
def test_layers_without_a_gradient_have_samples_where_their_neighbours_have_them(steps: int) -> None:
    """No gradient says where they are: with as many steps as samples, that was taken for time; with others, refused."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(DeadInside().double()), bpk.extend(nn.MSELoss(reduction="sum"))
    x, y = rand(N, steps, 2), rand(N, steps)
    with bpk.backpack(E.BatchDiagGGNExact(), E.KFLR()):
        loss_fn(model(x), y).backward()
    rows = {name: p.diag_ggn_exact_batch for name, p in model.named_parameters()}
    dead = model.encoder.layers[0].linear1.weight
    assert dead.kflr[1].trace() > 0
    assert dead.diag_ggn_exact_batch.shape == (N, 4, 2)
    with bpk.backpack(E.DiagGGNExact(subsampling=[1]), E.DiagHessian(subsampling=[1]), E.KFAC(subsampling=[1])):
        loss_fn(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact, rows[name][1], msg=name)
    with bpk.backpack(E.KFLR()):
        loss_fn(model(x[:1]), y[:1]).backward()
    alone = dead.kflr[1]
    with bpk.backpack(E.KFLR(subsampling=[0])):
        loss_fn(model(x), y).backward()
    torch.testing.assert_close(dead.kflr[1], alone / N)  # the divisor stays that of the batch


class AlmostDead(nn.Module):
    """Layers, time first, whose inner ones get the gradient of one step of one sample only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.LayerNorm(2), nn.Linear(2, 1, bias=False), nn.Linear(1, 2)
        nn.init.constant_(self.inner.weight[:, :1], 1.0)
        nn.init.constant_(self.inner.weight[:, 1:], -1.0)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x.transpose(0, 1))
        return (self.last(torch.relu(self.inner(z))) + z).transpose(0, 1)[..., 0]


@pytest.mark.parametrize("steps", LENGTHS)
def test_layers_with_one_gradient_have_samples_where_their_neighbours_have_them(steps: int) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(AlmostDead().double()), bpk.extend(nn.MSELoss(reduction="sum"))
    x, y = rand(N, steps, 2).sort(-1).values, rand(N, steps)
    x[1, 1] = x[1, 1].flip(0)  # positive in front of the ReLU
    with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
        loss_fn(model(x), y).backward()
    rows = {p: (p.grad_batch, p.diag_ggn_exact_batch) for p in model.parameters()}
    for n in range(N):
        for p, grad in zip(rows, torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]), [*rows]), strict=True):
            torch.testing.assert_close(rows[p][0][n], grad)
        with bpk.backpack(E.DiagGGNExact(subsampling=[n])):
            loss_fn(model(x), y).backward()
        for p, (_, diagonals) in rows.items():
            torch.testing.assert_close(p.diag_ggn_exact, diagonals[n])


class Reordered(nn.Module):
    """Puts samples into another order, and back behind a layer, as where a batch is shuffled for its statistics."""

    def __init__(
        self, shape: tuple[int, ...], there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(shape[-1], 2), nn.Linear(2 * torch.Size(shape[:-1]).numel(), 3)
        self.there, self.back = there, back

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.last(self.first(x).tanh().flatten(1))
        return self.last(self.back(self.first(self.there(x)).tanh()).flatten(1))


ORDER = torch.tensor([2, 0, 3, 1])
ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "reversed": (lambda x: x.flip(0), lambda x: x.flip(0)),
    "rolled": (lambda x: x.roll(1, 0), lambda x: x.roll(-1, 0)),
    "picked": (lambda x: x[ORDER], lambda x: x[ORDER.argsort()]),
}


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 3), (2, 2, 3), (1, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_samples_in_another_order(order: str, shape: tuple[int, ...]) -> None:
    """Inner axes whose sizes would do as well are none of samples."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Reordered(shape, *ORDERS[order]).double()), bpk.extend(nn.MSELoss())
    x, y = torch.randn(4, *shape).double(), torch.randn(4, 3).double()
    for _ in range(2):
        with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
            loss_fn(model(x), y).backward()
        for n in range(4):
            alone = torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / 4, list(model.parameters()))
            for p, grad in zip(model.parameters(), alone, strict=True):
                assert p.grad_batch.shape[0] == 4 and p.diag_ggn_exact_batch.shape[0] == 4
                torch.testing.assert_close(p.grad_batch[n], grad)
