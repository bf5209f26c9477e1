"""Steps of time are no samples: where a model looks at them one by one, and where they come first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.references.compare import Assembled, rand


def step_by_step(m: Assembled, x: Tensor) -> Tensor:
    return torch.stack([m.second(m.act(m.first(step))) for step in x.unbind(1)], 1)


def steps_in_front(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(x.transpose(0, 1)))).transpose(0, 1)


def sample_by_sample(m: Assembled, x: Tensor) -> Tensor:
    return torch.stack([m.second(m.act(m.first(sample))) for sample in x])


def two_views(m: Assembled, x: Tensor) -> Tensor:
    return torch.stack([m.second(m.act(m.first(view))) for view in (x[:, 0], x[:, 1].sin())], 1)


def copied_in_front(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(x.transpose(0, 1).contiguous()))).transpose(0, 1)


def flat_in_front(m: Assembled, x: Tensor) -> Tensor:
    rows = m.second(m.act(m.first(x.transpose(0, 1).flatten(0, 1))))
    return rows.unflatten(0, x.shape[1::-1]).transpose(0, 1)


def scaled_in_front(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(2 * x.transpose(0, 1)))).transpose(0, 1)


def in_front_later(m: Assembled, x: Tensor) -> Tensor:
    return m.second(m.act(m.first(x).transpose(0, 1))).transpose(0, 1)


ONE_BY_ONE = (step_by_step, steps_in_front, sample_by_sample, two_views)
ONE_BY_ONE += (copied_in_front, flat_in_front, scaled_in_front, in_front_later)


@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("forward", ONE_BY_ONE)
def test_steps_that_never_meet_are_no_samples(
    forward: Callable[[Assembled, Tensor], Tensor], n: int, steps_first: bool
) -> None:
    """The graph alone would agree with as many samples as steps, or rows: there are as many as the model was given."""
    torch.manual_seed(0)
    model = Assembled(forward, first=nn.Linear(2, 4), act=nn.Tanh(), second=nn.Linear(4, 3)).double()
    x = rand(n, 4, 2)
    y = torch.randint(3, model(x).shape[:2])
    expected = []
    for k in range(n):
        loss = F.cross_entropy(model(x[k : k + 1]).flatten(0, 1), y[k]) / n
        expected.append(torch.autograd.grad(loss, list(model.parameters())))
    order = (lambda z: z.transpose(0, 1)) if steps_first else (lambda z: z)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.BatchDiagGGNExact()):
            loss_fn(order(model(x)).flatten(0, 1), order(y).flatten()).backward()
        for k, p in enumerate(model.parameters()):
            torch.testing.assert_close(p.grad_batch, torch.stack([rows[k] for rows in expected]))
            torch.testing.assert_close(p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact)


def test_time_comes_first_where_its_steps_meet() -> None:
    """What a model was given has time in front, and its steps meet: they are no samples."""
    torch.manual_seed(0)
    model = Assembled(lambda m, x: m.second(m.first(x).tanh().cumsum(0)), first=nn.Linear(2, 4), second=nn.Linear(4, 3))
    x, y = rand(4, 3, 2), torch.randint(3, (4, 3))
    model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x).flatten(0, 1), y.flatten()).backward()
    found = model.first.weight.grad_batch
    for k in range(3):
        loss = F.cross_entropy(model(x[:, k : k + 1]).flatten(0, 1), y[:, k]) / 3
        torch.testing.assert_close(found[k], torch.autograd.grad(loss, model.first.weight)[0])


def last_step(outputs: list[Tensor]) -> Tensor:
    return outputs[-1]


def all_steps(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs)


def mean_step(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs).mean(0)


@pytest.mark.parametrize(("t", "n"), [(2, 6), (2, 4), (3, 5), (5, 3), (4, 8), (6, 2), (3, 3)])
@pytest.mark.parametrize("embedded", [False, True], ids=["steps", "embedded first"])
@pytest.mark.parametrize("read", [last_step, all_steps, mean_step])
def test_steps_in_front_that_meet_are_no_samples(
    read: Callable[[list[Tensor]], Tensor], embedded: bool, t: int, n: int
) -> None:
    """What a recurrent loop is given has time in front, also where its length divides the number of samples."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        outputs, h = [], x.new_zeros(x.shape[1], 4)
        for step in m.first(x) if embedded else x:
            h = torch.tanh(m.step(step) + m.state(h))
            outputs.append(h)
        return m.head(read(outputs))

    size = 4 if embedded else 2
    layers = {"step": nn.Linear(size, 4), "state": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    model = Assembled(forward, **({"first": nn.Linear(2, 4)} if embedded else {}), **layers).double()
    x = rand(t, n, 2)
    y = torch.randint(3, model(x).shape[:-1])
    expected = []
    for k in range(n):
        loss = F.cross_entropy(model(x[:, k : k + 1]).flatten(0, -2), y[..., k].flatten()) / n
        expected.append(torch.autograd.grad(loss, list(model.parameters())))
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x).flatten(0, -2), y.flatten()).backward()
    for p, rows in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


def test_steps_of_one_sequence_are_no_samples() -> None:
    """Time in front, and one sequence: nobody can tell that its steps are no samples, but that they meet."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        outputs, h = [], x.new_zeros(1, 4)
        for step in x:
            h = torch.tanh(m.step(step) + m.state(h))
            outputs.append(m.head(h))
        return torch.cat(outputs)

    model = Assembled(forward, step=nn.Linear(2, 4), state=nn.Linear(4, 4), head=nn.Linear(4, 3)).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad()), pytest.raises(UnsupportedLayer, match="feeds several"):
        loss_fn(model(rand(5, 1, 2)), torch.randint(3, (5,))).backward()


def attend(m: Assembled, h: Tensor) -> Tensor:
    q, k, v = m.qkv(h).chunk(3, -1)
    return torch.einsum("nts,snd->tnd", torch.einsum("tnd,snd->nts", q, k).softmax(-1), v)


def attention(m: Assembled, x: Tensor) -> Tensor:
    return m.head(attend(m, x * m.scale))


def on_flattened_rows(m: Assembled, x: Tensor) -> Tensor:
    rows = (x * m.scale).flatten(0, 1)
    h = m.qkv(rows).unflatten(0, x.shape[:2]).cumsum(0)[..., :4]
    return m.head(h.flatten(0, 1)).unflatten(0, x.shape[:2])


def cells(m: Assembled, x: Tensor) -> Tensor:
    outputs, h = [], torch.zeros_like(x[0])
    for step in x * m.scale:
        h = m.cell(step, h)
        outputs.append(m.head(h))
    return torch.stack(outputs)


@pytest.mark.parametrize("end", ["time first", "samples first", "one prediction"])
@pytest.mark.parametrize(("t", "n"), [(2, 4), (2, 2), (3, 6), (4, 2)])
@pytest.mark.parametrize("forward", [attention, on_flattened_rows, cells])
def test_steps_in_front_of_what_a_parameter_has_scaled(
    forward: Callable[[Assembled, Tensor], Tensor], t: int, n: int, end: str
) -> None:
    """No layer is given data itself, and the number of steps divides that of the samples, or the other way round."""
    torch.manual_seed(0)
    layers = {"qkv": nn.Linear(4, 12)} if forward is not cells else {"cell": nn.GRUCell(4, 4)}
    model = Assembled(forward, **layers, head=nn.Linear(4, 3)).double()
    model.scale = nn.Parameter(torch.rand(4).double() + 0.5)
    x = rand(t, n, 4)

    def prediction(x: Tensor) -> Tensor:
        out = model(x)
        return out.mean(0) if end == "one prediction" else (out if end == "time first" else out.transpose(0, 1))

    y = torch.randint(3, prediction(x).shape[:-1])
    expected = []
    for k in range(n):
        target = y[:, k : k + 1] if end == "time first" else y[k : k + 1]
        loss = F.cross_entropy(prediction(x[:, k : k + 1]).flatten(0, -2), target.flatten()) / n
        expected.append(torch.autograd.grad(loss, list(model.parameters())))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(prediction(x).flatten(0, -2), y.flatten()).backward()
    for p, rows in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


class Nodes(nn.Module):
    """What comes first among the arguments is shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, matrix: Tensor, x: Tensor) -> Tensor:
        return self.last((matrix @ self.first(x)).tanh())


@pytest.mark.parametrize(("k", "n"), [(2, 4), (3, 6), (2, 6), (4, 2)])
def test_nodes_beside_the_matrix_of_their_graph(k: int, n: int) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Nodes().double()), bpk.extend(nn.CrossEntropyLoss())
    matrix, x, y = torch.rand(k, k).double(), rand(n, k, 3), torch.randint(3, (n, k))
    expected = []
    for one, target in zip(x, y, strict=True):
        loss = F.cross_entropy(model(matrix, one[None])[0], target) / n
        expected.append(torch.autograd.grad(loss, list(model.parameters())))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(matrix, x).flatten(0, 1), y.flatten()).backward()
    for p, rows in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


class Rollout(nn.Module):
    """Steps `[T, N, D]` of environments, whose states are set back when they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.step, self.act = nn.Linear(2, 2), nn.GRUCell(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, done: Tensor) -> Tensor:
        seen, h, states = torch.relu(self.see(x)), x.new_zeros(x.shape[1], 3), []
        for now, over in zip(seen, done, strict=True):
            h = self.step(now, h * (1 - over)[:, None])
            states.append(h)
        out: Tensor = self.act(torch.stack(states).flatten(0, 1))
        return out


def test_steps_that_do_not_reach_each_other() -> None:
    """Three steps of two environments had counted as rows of two samples: what tells was set back, or zero."""
    torch.manual_seed(0)
    model, x = Rollout().double(), torch.rand(3, 2, 2).double()
    with torch.no_grad():
        model.see.weight.copy_(torch.eye(2))
        model.see.bias.zero_()
    x[1, 0] = -1.0  # nothing is seen in the only row that would be of two samples
    done, y = torch.tensor([[0, 1], [1, 1], [1, 0]]).double(), torch.tensor([[0, 1], [1, 1], [0, 1]])
    params = list(model.parameters())
    each = [torch.autograd.grad(F.cross_entropy(model(x[:, [n]], done[:, [n]]), y[:, n]) / 2, params) for n in range(2)]
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(bpk.extend(model)(x, done), y.flatten()).backward()
    for p, rows in zip(params, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


class Product(nn.Module):
    """All that is trained is a parameter that a function uses, on rows of data with time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x.transpose(0, 1).flatten(0, 1), self.weight))


@pytest.mark.parametrize("quantities", [(E.BatchGrad(),), (E.BatchGrad(), E.BatchDiagGGNExact())], ids=len)
@pytest.mark.parametrize(("n", "steps"), [(3, 2), (2, 3), (3, 3), (4, 2)])
def test_functions_see_time_in_front(n: int, steps: int, quantities: tuple[Any, ...]) -> None:
    """Each of so many rows side by side had been one sample's. The data need not be there any more: it is kept."""
    torch.manual_seed(0)
    model, x, y = Product(), torch.rand(n, steps, 2).double(), torch.randint(4, (steps, n))
    expected = [torch.autograd.grad(F.cross_entropy(model(x[[k]]), y[:, k]) / n, [model.weight])[0] for k in range(n)]
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for data in (x, None):
        with bpk.backpack(*quantities):
            loss_fn(bpk.extend(model)(x.clone() if data is None else data), y.flatten()).backward()
        torch.testing.assert_close(model.weight.grad_batch, torch.stack(expected))


class StepByStep(nn.Module):
    """A recurrent cell, written as most people do, over the first axis of what it is given."""

    def __init__(self, kind: str, result: str) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 2) if kind == "cell" else nn.Linear(4, 2)
        self.kind, self.result = kind, result
        self.start, self.head = nn.Parameter(torch.randn(1, 2), requires_grad=kind != "a constant"), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:  # [T, N, D]
        h = self.start.expand(x.shape[1], -1)
        states = list[Tensor]()
        for step in x:
            h = self.cell(step, h) if self.kind == "cell" else torch.tanh(self.cell(torch.cat([step, h], 1)))
            states.append(h)
        if self.result == "last":
            return self.head(states[-1])
        if self.result == "each":
            return torch.stack([self.head(h) for h in states], 1).flatten(0, 1)
        return self.head(torch.stack(states, 1)).flatten(0, 1)


@pytest.mark.filterwarnings("ignore:The model was given")
@pytest.mark.parametrize("kind", ["cell", "linear", "a constant"])
@pytest.mark.parametrize("result", ["last", "each", "all"])
@pytest.mark.parametrize("shape", [(2, 4), (3, 6), (4, 2)])
def test_steps_in_front_are_no_samples_where_samples_are_a_multiple(
    shape: tuple[int, int], result: str, kind: str
) -> None:
    torch.manual_seed(0)
    steps, n = shape
    model, loss_fn = bpk.extend(StepByStep(kind, result).double()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        x, y = torch.randn(steps, n, 2).double(), torch.randint(3, (n if result == "last" else n * steps,))
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x), y).backward()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none").reshape(n, -1).sum(1) / len(y)
        for p in [p for p in model.parameters() if p.requires_grad]:
            expected = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            torch.testing.assert_close(p.grad_batch, expected)
