"""Mixtures of experts: layers that are sent some of the rows, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

N, T, D, C = 6, 5, 4, 3


class Around(nn.Module):
    """A layer in the form of an expert `[R, D] -> [R, D]`."""

    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, x)


class Functions(nn.Module):
    """A product with a parameter, and one that is added, by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.added = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,de->ne", x, self.weight).sin() * self.added


def attended(layer: nn.Module, x: Tensor) -> Tensor:
    h = x.view(-1, 2, 2)
    return layer(h, h, h, need_weights=False)[0].reshape(-1, D)


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, D)),
    "normalised": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU(), nn.GroupNorm(2, D)),
    "statistics": lambda: nn.Sequential(nn.BatchNorm1d(D), nn.PReLU(D)).eval(),
    "image": lambda: Around(
        nn.Conv2d(1, 1, 2, padding=1), lambda f, x: x + f(x.view(-1, 1, 2, 2)).mean((1, 2, 3))[:, None]
    ),
    "attention": lambda: Around(nn.MultiheadAttention(2, 1, batch_first=True), attended),
    "sequence": lambda: Around(nn.LSTM(2, D, batch_first=True), lambda f, x: f(x.view(-1, 2, 2))[0][:, -1]),
    "cell": lambda: nn.GRUCell(D, D),
    "table": lambda: Around(nn.Embedding(3, D), lambda f, x: f((x[:, 1] > 0).long())),
    "pair": lambda: Around(nn.Bilinear(D, D, D), lambda f, x: f(x, x)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)),
    "functions": Functions,
}


class Mixture(nn.Module):
    """Rows `[R, D]`, or those of `[N, T, D]` side by side, are sent to the first or the last of three experts."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(D, 3), nn.Linear(D, C)
        self.experts = nn.ModuleList([expert() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        shares, chosen = self.gate(rows).softmax(-1), 2 * (rows[:, 0] > 0).long()
        out = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            mine = chosen == k
            out[mine] = expert(rows[mine]) * shares[mine, k, None]
        return self.head(out.reshape(x.shape).flatten(1, -2).mean(1) if x.dim() > 2 else out)


def made(name: str, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model, x = Mixture(EXPERTS[name]).double(), torch.randn(shape).double()
    return model, x, torch.arange(len(x)) % C


def gradients(value: Tensor, params: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]


@pytest.mark.parametrize("shape", [(N, D), (N, T, D)])
@pytest.mark.parametrize("name", EXPERTS)
def test_against_plain_autograd(name: str, shape: tuple[int, ...]) -> None:
    model, x, y = made(name, shape)
    loss_fn, params = nn.CrossEntropyLoss(), list(model.parameters())
    rows = [gradients(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / N, params) for n in range(N)]
    out = model(x)
    p = out.softmax(1).detach()
    squares = [torch.zeros_like(q) for q in params]
    for n in range(N):
        values, vectors = torch.linalg.eigh((p[n].diag() - p[n].outer(p[n])) / N)
        for column in (vectors * values.clamp(min=0).sqrt()).T:
            for total, g in zip(squares, gradients(out[n] @ column, params), strict=True):
                total += g.square()
    bpk.extend(model), bpk.extend(loss_fn)
    for quantities in ([E.BatchGrad()], [E.BatchL2Grad(), E.SumGradSquared(), E.Variance()], [E.DiagGGNExact()]):
        with bpk.backpack(*quantities):
            loss_fn(model(x), y).backward()
    for k, q in enumerate(params):
        each = torch.stack([row[k] for row in rows])
        torch.testing.assert_close(q.grad_batch, each)
        torch.testing.assert_close(q.batch_l2, each.flatten(1).square().sum(1))
        torch.testing.assert_close(q.sum_grad_squared, each.square().sum(0))
        torch.testing.assert_close(q.variance, each.var(0, correction=0))
        torch.testing.assert_close(q.diag_ggn_exact, squares[k])


@pytest.mark.parametrize(
    "extension",
    [
        E.BatchDiagGGNExact(),
        E.DiagGGNMC(),
        E.SqrtGGNExact(),
        E.DiagHessian(),
        E.BatchDiagHessian(),
        E.KFAC(),
        E.KFLR(),
        E.KFLR("expand"),
        E.BatchKFLR(),
        E.EKFAC(),
        E.HMP(),
        E.GGNMP(),
        E.PCHMP(),
        E.ClippedGrad(0.1),
        E.GradGram(),
        E.GGNGram(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", EXPERTS)
def test_what_no_row_reaches_is_zero(name: str, extension: E.BackpropExtension) -> None:
    """Fields are there, finite, and zero at the expert without rows; or the pass is refused with a reason."""
    model, x, y = made(name, (N, D))
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    try:
        with bpk.backpack(extension):
            loss_fn(model(x), y).backward()
    except NotImplementedError as error:
        assert isinstance(extension, (E.HMP, E.GGNMP, E.PCHMP, E.DiagHessian, E.BatchDiagHessian)), error
        return
    for path, p in model.named_parameters():
        value = getattr(p, extension.savefield)
        value = value(torch.randn(1, *p.shape).double()) if callable(value) else value
        if isinstance(extension, E.EKFAC):
            value = value.moments
        for part in value if isinstance(value, (list, tuple)) else [value]:
            dense = part.to_dense() if part.is_sparse else part
            assert dense.isfinite().all(), path
            assert not path.startswith("experts.1.") or not dense.any(), path


class OneOfTwo(nn.Module):
    """All steps of all samples are sent to the first of two experts, which sees them in the order of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 2)
        self.experts = nn.ModuleList([nn.Linear(D, C) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        shares, out = self.gate(x).softmax(-1), x.new_zeros(*x.shape[:-1], C)
        for k, expert in enumerate(self.experts):
            mine = torch.full(x.shape[:-1], k == 0)
            out[mine] = expert(x[mine]) * shares[mine][..., k, None]
        return out.flatten(0, 1)


def test_an_expert_of_the_data_without_rows() -> None:
    """Whether the samples are in order where data is read is no question where none is read."""
    torch.manual_seed(0)
    model, loss_fn = OneOfTwo().double(), nn.CrossEntropyLoss()
    x, y, params = torch.randn(3, 2, D).double(), torch.arange(6) % C, list(model.parameters())
    rows = [gradients(loss_fn(model(x[n : n + 1]), y[2 * n : 2 * n + 2]) / 3, params) for n in range(3)]
    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for k, p in enumerate(params):
        torch.testing.assert_close(p.grad_batch, torch.stack([row[k] for row in rows]))


def test_quantities_are_verified() -> None:
    model, x, y = made("linear", (N, D))
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y)


@pytest.mark.parametrize("chosen", [[0, 2, 3, 5], [1, 2]])
def test_sequences_of_some_samples(chosen: list[int]) -> None:
    """A recurrent layer knows its batch axis; where it is given some samples only, these are not all that there are."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(2, D, batch_first=True) for _ in range(2)])
            self.head = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), D).double()
            if len(x) == 1:  # the loop of the reference: one sample after the other
                return self.head(self.layers[int(self.at not in chosen)](x)[0][:, -1])
            mine = torch.zeros(len(x), dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)
            for rows, layer in zip((mine, ~mine), self.layers, strict=True):
                out[rows] = layer(x[rows])[0][:, -1]
            return self.head(out)

    model, loss_fn = Some().double(), nn.CrossEntropyLoss()
    x, y, rows = torch.randn(N, 3, 2).double(), torch.arange(N) % C, []
    for n in range(N):
        model.at = n
        rows.append(gradients(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / N, list(model.parameters())))
    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for k, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad_batch, torch.stack([row[k] for row in rows]))


def test_trees() -> None:
    """Nodes are looked at one by one, and the model is given no tensor that would say how many samples there are."""

    class Trees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.join, self.head = nn.Embedding(5, D), nn.Linear(2 * D, D), nn.Linear(D, C)

        def encode(self, tree: int | tuple) -> Tensor:
            if isinstance(tree, int):
                return self.table(torch.tensor([tree]))
            return torch.tanh(self.join(torch.cat([self.encode(branch) for branch in tree], 1)))

        def forward(self, trees: list) -> Tensor:
            return self.head(torch.cat([self.encode(tree) for tree in trees]))

    model, loss_fn = Trees().double(), nn.CrossEntropyLoss()
    trees, y = [((0, 1), 2), (3, (4, (1, 2))), 0], torch.arange(3)
    params = list(model.parameters())
    rows = [gradients(loss_fn(model(trees[n : n + 1]), y[n : n + 1]) / 3, params) for n in range(3)]
    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(trees), y).backward()
    for k, p in enumerate(params):
        torch.testing.assert_close(p.grad_batch, torch.stack([row[k] for row in rows]))


def test_products_with_no_vectors() -> None:
    """Rules expect one column at least: some had failed, with torch's errors."""
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)))
    with bpk.backpack(E.HMP(), E.GGNMP(), E.PCHMP()):
        bpk.extend(nn.CrossEntropyLoss())(model(torch.randn(4, 2)), torch.tensor([0, 1, 1, 0])).backward()
    for p in model.parameters():
        for product in (p.hmp, p.ggnmp, p.pchmp):
            assert product(torch.zeros(0, *p.shape)).shape == (0, *p.shape)


@pytest.mark.parametrize(
    "extension",
    [
        E.DiagGGNExact(),
        E.BatchDiagGGNExact(),
        E.DiagGGNMC(),
        E.SqrtGGNExact(),
        E.DiagHessian(),
        E.BatchDiagHessian(),
        E.KFLR(),
        E.KFRA(),
        E.HMP(),
    ],
    ids=repr,
)
def test_predictions_without_entries(extension: E.BackpropExtension) -> None:
    """Sequences of no steps: fields are there, and zero."""
    layers = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C))
    model, loss_fn = bpk.extend(layers), bpk.extend(nn.MSELoss(reduction="sum"))
    with bpk.backpack(extension):
        loss_fn(model(torch.randn(N, 0, D)), torch.randn(N, 0, C)).backward()
    for p in model.parameters():
        value = getattr(p, extension.savefield)
        value = value(torch.ones(1, *p.shape)) if callable(value) else value
        assert not any(part.any() for part in (value if isinstance(value, list) else [value]))
