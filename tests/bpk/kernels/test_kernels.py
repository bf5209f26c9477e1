"""Neural tangent kernels, eigenpairs and projections of whole models, by plain Jacobians."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import bpk
from bpk import kernels
from bpk.costing.allocated import allocated
from bpk.extensions import BatchGrad, GGNGram, GradGram, SqrtGGNExact
from bpk.jacobians.core import outer
from bpk.kernels import Diagonal, Kronecker, LowRank
from bpk.plan.samples import placement

Make = Callable[[int], Tensor]


class Tied(nn.Module):
    """A tied table, a layer that is used twice, a parameter that functions use, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.scale = nn.Parameter(torch.randn(4))
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))) * self.scale).mean(1)


class Windows(nn.Module):
    """Positions folded into the batch axis, so that rows are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        folded = torch.tanh(self.inner(x.flatten(0, 1)))
        return self.outer(folded.reshape(len(x), -1))


def convolutional() -> nn.Module:
    convolutions = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    return Last()


MODELS: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "convolutional": (convolutional, lambda n: torch.randn(n, 2, 5, 5)),
    "tied": (Tied, lambda n: torch.randint(7, (n, 3))),
    "table": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)),
        lambda n: torch.randint(7, (n, 3)),
    ),
    "windows": (Windows, lambda n: torch.randn(n, 2, 3)),
    "recurrent": (recurrent, lambda n: torch.randn(n, 3, 3)),
}
N = 5


@pytest.fixture(autouse=True)
def doubles() -> object:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=MODELS)
def given(request: pytest.FixtureRequest) -> tuple[nn.Module, Make]:
    make, data = MODELS[request.param]
    return bpk.extend(make()), data


@pytest.fixture(params=["room", "no room"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and products of positions in one piece, and in as many as there can be."""
    if request.param == "no room":
        monkeypatch.setattr(outer, "ROOM", 1)


def jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """`[N, C, P]` by parameter."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x[None],))[0].flatten()

    if "lstm.weight_ih_l0" in params:  # vmap does not serve recurrent layers
        with bpk.disable():
            rows = [jacrev(lambda p, one=one: outputs(p, one))(params) for one in x]
        return {name: torch.stack([row[name] for row in rows]).flatten(2) for name in params}
    with bpk.disable():
        return {name: rows.flatten(2) for name, rows in vmap(jacrev(outputs), (None, 0))(params, x).items()}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-11)


def test_ntk(given: tuple[nn.Module, Make], room: None) -> None:
    model, data = given
    x1, x2 = data(N), data(3)
    left, right = jacobians(model, x1), jacobians(model, x2)
    full = sum(torch.einsum("ncp,mdp->nmcd", left[name], right[name]) for name in left)
    close(bpk.ntk(model, x1, x2), full)
    close(bpk.ntk(model, x1, x2, kind="diagonal"), full.diagonal(dim1=2, dim2=3))
    close(bpk.ntk(model, x1, x2, kind="trace"), torch.einsum("nmcc->nm", full))
    alone = sum(torch.einsum("ncp,mdp->nmcd", rows, rows) for rows in left.values())
    close(bpk.ntk(model, x1), alone)
    assert all(p.grad is None and not vars(p) for p in model.parameters())


class Pooled(nn.Module):
    """Sequences of any length; functions use a parameter, and a layer serves long ones only."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        self.first, self.last, self.extra = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.scale, self.pools = nn.Parameter(torch.rand(4) + 0.5), pools

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh() * self.scale
        x = self.extra(x) if x.shape[1] > 3 else x
        return self.last(x.mean(1) if self.pools else x)


@pytest.mark.parametrize("pools", [True, False])
def test_ntk_of_samples_of_other_shapes(pools: bool, room: None) -> None:
    model = bpk.extend(Pooled(pools))
    for x1, x2 in ((torch.randn(N, 5, 3), torch.randn(2, 3, 3)), (torch.randn(2, 3, 3), torch.randn(N, 5, 3))):
        left, right = jacobians(model, x1), jacobians(model, x2)
        full = sum(torch.einsum("ncp,mdp->nmcd", left[name], right[name]) for name in left)
        close(bpk.ntk(model, x1, (x2,)), full)
        if pools:
            close(bpk.ntk(model, x1, x2, kind="diagonal"), full.diagonal(dim1=2, dim2=3))
            close(bpk.ntk(model, (x1,), x2, kind="trace"), torch.einsum("nmcc->nm", full))
        assert all(p.grad is None and not vars(p) for p in model.parameters())


@pytest.mark.parametrize("of", ["ggn", "ggn_mc", "empirical_fisher"])
def test_eigenpairs(given: tuple[nn.Module, Make], of: str) -> None:
    model, data = given
    x, loss_fn = data(N), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(x), torch.arange(N) % 3)
    pairs = bpk.eigenpairs(model, loss, k=3, of=of)
    flat = torch.cat([v.flatten(1) for v in pairs.vectors.values()], 1)
    close(flat @ flat.T, torch.eye(3))
    with bpk.backpack(SqrtGGNExact(), BatchGrad()):
        loss_fn(model(x), torch.arange(N) % 3).backward()
    gradients = torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1)
    close(pairs.slopes, gradients @ flat.T)
    close(pairs.curvatures.sum(0), pairs.values)
    if of == "ggn_mc":
        return
    root = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in model.parameters()], 2)
    root = gradients[None] if of == "empirical_fisher" else root
    matrix = torch.einsum("cnp,cnq->pq", root, root)
    close(matrix @ flat.T, flat.T * pairs.values)
    close(pairs.values, torch.linalg.eigvalsh(matrix).flip(0)[:3])
    close(pairs.curvatures, (root @ flat.T).square().sum(0))


@pytest.mark.parametrize("of", ["ggn", "ggn_mc"])
def test_eigenpairs_of_two_losses(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of both, each of the pairs' a column at a time; not of losses that look at different parameters."""
    monkeypatch.setattr("bpk.sweeps.columns.run.PIECE", 1)
    model, first, second = (bpk.extend(m) for m in (nn.Linear(3, 4), nn.CrossEntropyLoss(), nn.MSELoss()))
    x, y, goal = torch.randn(N, 3), torch.arange(N) % 3, torch.randn(N, 2)

    def loss() -> Tensor:
        out = torch.tanh(model(x))
        return first(out[:, :3], y) + 2 * second(out[:, 2:], goal)

    pairs = bpk.eigenpairs(model, loss(), k=4, of=of)
    flat = torch.cat([v.flatten(1) for v in pairs.vectors.values()], 1)
    close(flat @ flat.T, torch.eye(4))
    if of == "ggn":
        with bpk.backpack(SqrtGGNExact()):
            loss().backward()
        root = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in model.parameters()], 2).flatten(0, 1)
        close(root.T @ (root @ flat.T), flat.T * pairs.values)
    apart = nn.ModuleList([model, bpk.extend(nn.Linear(3, 4))])
    both = first(apart[0](x), y) + first(apart[1](x), y)
    with pytest.raises(NotImplementedError, match="behind other losses"):
        bpk.eigenpairs(apart, both, of=of)


def test_eigenpairs_of_zero() -> None:
    """The GGN of a loss that is linear in its prediction: there are none."""
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))), bpk.extend(nn.NLLLoss())
    pairs = bpk.eigenpairs(model, loss_fn(model(torch.randn(N, 3)), torch.arange(N) % 2), k=3)
    assert pairs.values.shape == (0,) and pairs.slopes.shape == pairs.curvatures.shape == (N, 0)
    assert {name: v.shape for name, v in pairs.vectors.items()} == {"0.weight": (0, 2, 3), "0.bias": (0, 2)}


def test_memory_is_that_of_one_layers_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of few more: one column makes a block here, and a few rows are made at a time."""
    monkeypatch.setattr("bpk.sweeps.columns.run.PIECE", 1)
    monkeypatch.setattr("bpk.fields.rows.PIECE", 1)
    monkeypatch.setattr(outer, "ROOM", 1 << 12)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(4)
    model = bpk.extend(nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 20)))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 1, 16, 16), torch.arange(4)
    layer = 20 * 4 * 8 * 16 * 16 * 8

    def gram() -> None:
        with bpk.backpack(GGNGram(), extension_hook=bpk.Summed("ggn_gram")):
            loss_fn(model(x), y).backward()

    for work in (gram, lambda: bpk.eigenpairs(model, loss_fn(model(x), y), k=2)):
        work()
        assert allocated(work, torch.device("cpu"))[0] < 2.2 * layer


def test_models_that_are_extended_in_parts_are_refused() -> None:
    """Values were those of the part, and vectors zero elsewhere."""
    model, loss_fn = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model[2])
    for work in (bpk.eigenpairs, bpk.projected_gradients):
        with pytest.raises(ValueError, match=r"in parts, without '0.weight'.*\n.*\n.*extend\(model\)"):
            work(model, loss_fn(model(torch.randn(N, 3)), torch.arange(N) % 2), k=4)
    model[0].requires_grad_(False)
    assert list(bpk.eigenpairs(model, loss_fn(model(torch.randn(N, 3)), torch.arange(N) % 2)).vectors) == [
        "2.weight",
        "2.bias",
    ]


def test_low_rank_of_eigenpairs() -> None:
    model, loss_fn = bpk.extend(nn.Linear(3, 2)), bpk.extend(nn.CrossEntropyLoss())
    x = torch.randn(N, 3)
    pairs = bpk.eigenpairs(model, loss_fn(model(x), torch.arange(N) % 2), k=20)
    with bpk.backpack(SqrtGGNExact()):
        loss_fn(model(x), torch.arange(N) % 2).backward()
    root = torch.cat([p.sqrt_ggn_exact.flatten(0, 1).flatten(1) for p in model.parameters()], 1)
    covariance = torch.linalg.inv(root.T @ root + 0.5 * torch.eye(8))
    rows = torch.cat(list(jacobians(model, x).values()), 2)
    found = bpk.predictive_covariance(model, x, LowRank.of(pairs.vectors, pairs.values, 0.5))
    close(found, rows @ covariance @ rows.mT)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "sparse", "factored"])
@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_projections_estimate_inner_products(kind: str) -> None:
    model = bpk.extend(Tied())
    x, loss_fn, y = torch.randint(7, (N, 3)), bpk.extend(nn.CrossEntropyLoss()), torch.arange(N) % 3
    total = bpk.Summed("grad_gram")
    with bpk.backpack(GradGram(), extension_hook=total):
        loss_fn(model(x), y).backward()
    found = []
    for seed in range(100):
        z = bpk.projected_gradients(model, loss_fn(model(x), y), 64, kind, seed)
        found.append(z @ z.T)
    error = torch.stack(found).mean(0) - total["grad_gram"]
    assert error.abs().max() < 0.1 * total["grad_gram"].abs().max()


def test_projections_are_the_same_for_parts_of_the_data() -> None:
    model, loss_fn = bpk.extend(convolutional()), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(N, 2, 5, 5), torch.arange(N) % 3
    whole = bpk.projected_gradients(model, loss_fn(model(x), y), 16)
    parts = [bpk.projected_gradients(model, loss_fn(model(x[some]), y[some]), 16) for some in (slice(2), slice(2, N))]
    close(whole, torch.cat(parts))


def test_summed() -> None:
    model, loss_fn = bpk.extend(Tied()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randint(7, (N, 3)), torch.arange(N) % 7
    total = bpk.Summed("ggn_gram", "grad_gram")
    with bpk.backpack(GGNGram(), GradGram(), SqrtGGNExact(), BatchGrad(), extension_hook=total):
        loss_fn(model(x), y).backward()
    root = torch.cat([p.sqrt_ggn_exact.flatten(0, 1).flatten(1) for p in model.parameters()], 1)
    close(total["ggn_gram"], root @ root.T)
    gradients = torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1)
    close(total["grad_gram"], gradients @ gradients.T)
    assert not any("grad_gram" in vars(p) or "ggn_gram" in vars(p) for p in model.parameters())
    with pytest.raises(KeyError, match="no sum of 'batch_l2'"):
        total["batch_l2"]
    with pytest.raises(ValueError, match="two parameters"):
        total.add("grad_gram", torch.ones(2, 2))


def test_where_gradients_are_off() -> None:
    """As predictions are made; the loss whose columns travel had been computed without a graph, and was refused."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)
    posterior = Diagonal({name: torch.ones_like(p).detach() for name, p in model.named_parameters()})
    expected = bpk.ntk(model, x), bpk.predictive_covariance(model, x, posterior)
    with torch.no_grad():
        torch.testing.assert_close((bpk.ntk(model, x), bpk.predictive_covariance(model, x, posterior)), expected)


def test_refusals() -> None:
    model, x = nn.Linear(3, 2), torch.randn(N, 3)
    with pytest.raises(ValueError, match="kind must be one of"):
        bpk.ntk(model, x, kind="all")
    for kind in ("diagonal", "trace"):
        with pytest.raises(ValueError, match=r"(?s)shapes \[5, 2\] and \[4, 2\] per sample.*with the same output"):
            bpk.ntk(model, torch.randn(N, 5, 3), torch.randn(N, 4, 3), kind)
    with pytest.raises(ValueError, match=r"names \['1.weight'\]"):
        bpk.predictive_covariance(model, x, Diagonal({"1.weight": torch.ones(2, 3)}))
    one = nn.Linear(1, 4)  # to which one number would be broadcast
    for posterior in (
        Diagonal({"weight": torch.ones(1)}),
        Kronecker({"weight": [torch.eye(4), torch.eye(2)]}),
        LowRank({"weight": torch.ones(2, 4)}),
        LowRank({"weight": torch.ones(2, 4, 1)}, isotropic={"weight": torch.ones(1, 4)}),
    ):
        with pytest.raises(ValueError, match=r"for 'weight', which has the shape \[4, 1\]"):
            bpk.predictive_covariance(one, torch.randn(N, 1), posterior)
    with pytest.raises(ValueError, match="negative variance"):
        bpk.predictive_covariance(one, torch.randn(N, 1), Diagonal({"weight": -torch.ones(4, 1)}))
    single, pair = [torch.eye(4)], [torch.eye(4), torch.eye(1)]
    for factors, prior in ((single, -2.0), (pair, -2.0), (pair, -1.0)):
        with pytest.raises(ValueError, match=r"precision that is not positive \((-1|0)\)(?s:.*)above zero"):
            bpk.predictive_covariance(one, torch.randn(N, 1), Kronecker({"weight": factors}, prior))
    with pytest.raises(ValueError, match="No parameter of Linear requires gradients"):
        bpk.ntk(nn.Linear(3, 2).requires_grad_(False), x)
    with pytest.raises(ValueError, match="one tensor of real numbers"):
        bpk.ntk(nn.LSTM(3, 2), x[None])
    for batches in (("a",), (x, "a"), (torch.zeros(()),), ((x, [1.0]),)):
        with pytest.raises(ValueError, match=r"ntk\(...\) got \w+ as x[12]"):
            bpk.ntk(model, *batches)
    for loss in ("a", torch.zeros(()), model(x)):
        with pytest.raises(ValueError, match=r"The loss is .*, and not a number that depends on parameters"):
            bpk.projected_gradients(model, loss)
    with pytest.raises(ValueError, match="of must be one of"):
        bpk.eigenpairs(model, torch.zeros(()), of="hessian")
    with pytest.raises(ValueError, match="k must be"):
        bpk.eigenpairs(model, torch.zeros(()), k=0)
    for k, kind in ((7, "factored"), ((2, 3), "gaussian"), (0, "gaussian"), (True, "sparse"), (2.0, "sparse")):
        with pytest.raises(ValueError, match="is no size of"):
            kernels.projected_gradients(model, torch.zeros(()), k, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["full", "diagonal", "trace"])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_outputs_that_are_none_of_two_batches(rows: int, kind: str) -> None:
    """A model that returns a fixed number of rows does not tell which are those of `x2`: the kernel had been empty."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[:rows])

    x = torch.randn(9, 3)
    with pytest.raises(ValueError, match=rf"given 9 rows, of x1 and x2, and its outputs are of {rows}"):
        bpk.ntk(Fixed(), x[:5], x[5:], kind)


def test_samples_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found out about samples of a model with attention is known in the next call, and not to other models."""
    asked = []
    attribute = placement.attribute
    monkeypatch.setattr(placement, "attribute", lambda *args: asked.append(1) or attribute(*args))
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 4), encoder, nn.Flatten(), nn.Linear(8, 2)).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    for seen in (1, 0):
        bpk.ntk(model, x)
        assert len(asked) == seen
        asked.clear()
    bpk.ntk(copy.deepcopy(model), x)
    assert len(asked) == 1


def test_jacobians_in_inference_mode() -> None:
    """A prediction is often made there, where no graph would be built."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    posterior = Diagonal({name: torch.ones_like(p) for name, p in model.named_parameters()})
    x = torch.randn(5, 3)
    with torch.inference_mode():
        same = x.clone()
        kernel, covariance = bpk.ntk(model, same), bpk.predictive_covariance(model, same, posterior)
    torch.testing.assert_close(kernel, bpk.ntk(model, x))
    torch.testing.assert_close(covariance, bpk.predictive_covariance(model, x, posterior))


def test_a_sum_that_is_not_there_says_so_in_lines() -> None:
    with pytest.raises(KeyError) as caught:
        bpk.Summed("grad_gram")["grad_gram"]
    assert "\n  Do:  write backpack(extension, extension_hook=total)" in str(caught.value)
