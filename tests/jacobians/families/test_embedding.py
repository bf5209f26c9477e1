"""Embedding and EmbeddingBag: options, arguments, large vocabularies, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import case
from bpk.jacobians.families import embedding
from bpk.rules import REGISTRY
from tests.helpers import FIRST_ORDER, backward, extended
from tests.references.compare import ON_ANY_GRAPH, Assembled, agrees, check, rand
from tests.references.reference import Reference

CE = nn.CrossEntropyLoss


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(vocab, shape)


class WeightedBag(nn.EmbeddingBag):
    """Tokens and their weights as the two inputs."""

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, per_sample_weights=weights)


class TwiceDifferentiable(WeightedBag):
    """The same, in operations that torch differentiates twice."""

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        counts = tokens != (-1 if self.padding_idx is None else self.padding_idx)
        return (F.embedding(tokens, self.weight, self.padding_idx) * (weights * counts)[..., None]).sum(1)


def weights_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def small(vocab: int, x: Tensor) -> Tensor:
    """Normal numbers as tokens."""
    return (1000 * x.abs()).long() % vocab


# ---- weights of tokens -------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", [WeightedBag, TwiceDifferentiable])
@pytest.mark.parametrize("padding", [None, 1])
def test_weights_of_tokens_are_an_input(layer: type[WeightedBag], padding: int | None) -> None:
    """Bilinear in the table and the weights: both products, their residual, and its columns."""
    rule = REGISTRY.find(nn.EmbeddingBag)
    assert rule is not None
    options = {"mode": "sum", "padding_idx": padding}
    example = case(layer, 4, 2, shape=(3, 4), target=weights_of, domain=partial(small, 4), **options)
    report = check_rule(rule, [example])
    assert report.passed["residual_mat_prod"] or layer is WeightedBag


def test_weights_of_tokens_may_come_from_a_layer() -> None:
    """Their curvature reaches the layer that computed them: every quantity against plain autograd."""
    x = tokens(5, 3, 4)

    def forward(model: Any, x: Tensor) -> Tensor:
        weights = torch.sigmoid(model.attention(model.look(x).squeeze(-1)))
        return model.head(model.table(x, per_sample_weights=weights))

    torch.manual_seed(0)
    table, head = nn.EmbeddingBag(5, 2, mode="sum", padding_idx=0), nn.Linear(2, 3)
    model = Assembled(forward, look=nn.Embedding(5, 1), attention=nn.Linear(4, 4), table=table, head=head)
    check(model, x)


# ---- bags given by offsets ---------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_given_by_offsets(mode: str, last: bool) -> None:
    """Bags of different lengths, one of them empty: the batch is that of the bags."""
    x = tokens(5, 7)
    offsets = torch.tensor([0, 3, 3, 5] + [7] * last)

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.table(x, offsets))

    torch.manual_seed(0)
    table = nn.EmbeddingBag(5, 2, mode=mode, include_last_offset=last, padding_idx=1)
    model, target = Assembled(forward, table=table, head=nn.Linear(2, 3)).double(), torch.tensor([0, 2, 1, 1])
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, target), samples=4)
    model, loss_fn = extended(model)
    backward(model, loss_fn, x, target, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref)


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_tokens_behind_the_last_offset(extension: Any) -> None:
    """Torch adds them to the last bag in float64, and leaves them out of sums in float32."""
    offsets = torch.tensor([0, 3, 5])

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.table(x, offsets))

    table = nn.EmbeddingBag(5, 2, mode="sum", include_last_offset=True)
    model, loss_fn = extended(Assembled(forward, table=table, head=nn.Linear(2, 3)).double())
    with pytest.raises(UnsupportedLayer, match=r"(?s)last offset.*Do:"):
        backward(model, loss_fn, tokens(5, 7), torch.tensor([0, 2]), extension())


def test_weights_of_tokens_in_bags_given_by_offsets() -> None:
    """Weights that are data change what a token contributes."""
    x, weights, offsets = tokens(5, 6), rand(6), torch.tensor([0, 2, 3])

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.table(x, offsets, per_sample_weights=weights))

    model = Assembled(forward, table=nn.EmbeddingBag(5, 2, mode="sum"), head=nn.Linear(2, 3)).double()
    target = torch.tensor([0, 2, 1])
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, target), samples=3)
    model, loss_fn = extended(model)
    backward(model, loss_fn, x, target, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref)


# ---- how models use embeddings -----------------------------------------------------------------------
def test_language_model() -> None:
    """Predictions at every position, padding among the tokens."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(torch.tanh(model.mix(model.table(x)))).transpose(1, 2)

    table = nn.Embedding(4, 2, padding_idx=3)
    model = Assembled(forward, table=table, mix=nn.Linear(2, 3), head=nn.Linear(3, 3))
    check(model, tokens(4, 3, 4), target=tokens(3, 3, 4))


def test_table_used_twice() -> None:
    """The contributions of both uses are added before they are squared."""

    def forward(model: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return model.head(model.table(left).sum(1) * torch.sigmoid(model.table(right)).sum(1))

    check(Assembled(forward, table=nn.Embedding(4, 3), head=nn.Linear(3, 3)), tokens(4, 3, 6))


def test_table_that_is_the_weight_of_the_last_layer() -> None:
    """Tied weights: everything but Kronecker factors, which look at the two layers from different sides."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(torch.tanh(model.table(x).sum(1)))

    model = Assembled(forward, table=nn.Embedding(3, 2), head=nn.Linear(2, 3, bias=False))
    model.head.weight = model.table.weight
    x, y = tokens(3, 4, 2), tokens(3, 4)
    model = model.double()
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    model, loss_fn = extended(model)
    backward(model, loss_fn, x, y, *[e() for e in ON_ANY_GRAPH if e not in (E.KFAC, E.KFLR)])
    agrees(model, ref, factors=False)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_short_integers(layer: type[nn.Module]) -> None:
    """Tokens may be of type int32, also in a vocabulary whose square no such integer holds."""
    vocab = 70_000
    width = 2 if layer is nn.EmbeddingBag else 6
    model, loss_fn = extended(nn.Sequential(layer(vocab, 2), nn.Flatten(), nn.Linear(width, 3)))
    x, y = tokens(vocab, 4, 3), tokens(3, 4)
    found = []
    for given in (x, x.int()):
        backward(model, loss_fn, given, y, E.SumGradSquared(), E.KFLR(), E.BatchL2Grad())
        table = model[0].weight
        found.append([table.sum_grad_squared, table.batch_l2, table.kflr[0], table.kflr[1].coalesce().values()])
    for long, short in zip(*found, strict=True):
        torch.testing.assert_close(short, long)


def test_subsampling() -> None:
    model, loss_fn = extended(nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)).double())
    x, y, chosen = tokens(5, 4, 3), tokens(3, 4), [2, 0]
    backward(model, loss_fn, x, y, E.BatchGrad(), E.BatchDiagGGNExact())
    table = model[0].weight
    rows, curvature = table.grad_batch, table.diag_ggn_exact_batch
    some = (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.BatchDiagGGNExact, E.DiagGGNExact)
    backward(model, loss_fn, x, y, *[e(subsampling=chosen) for e in some])
    torch.testing.assert_close(table.grad_batch, rows[chosen])
    torch.testing.assert_close(table.batch_l2, rows[chosen].flatten(1).square().sum(1))
    torch.testing.assert_close(table.sum_grad_squared, rows[chosen].square().sum(0))
    torch.testing.assert_close(table.diag_ggn_exact_batch, curvature[chosen])
    torch.testing.assert_close(table.diag_ggn_exact, curvature[chosen].sum(0))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_gradient_of_a_variance() -> None:
    """Fields stay differentiable under `create_graph`."""
    model, loss_fn = extended(nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(6, 3)).double())
    x, y = tokens(4, 5, 3), tokens(3, 5)
    loss = loss_fn(model(x), y)
    with bpk.backpack(E.Variance(), E.BatchGrad(), E.BatchL2Grad()):
        loss.backward(create_graph=True)
    table, head = model[0].weight, model[2].weight
    losses = [CE()(model(x[n : n + 1]), y[n : n + 1]) / 5 for n in range(5)]
    rows = [torch.autograd.grad(share, table, create_graph=True)[0] for share in losses]
    stacked = torch.stack(rows)
    expected = stacked.var(0, unbiased=False).sum() + stacked.flatten(1).square().sum(1).square().sum()
    found = table.variance.sum() + table.batch_l2.square().sum()
    pairs = zip(torch.autograd.grad(found, [table, head]), torch.autograd.grad(expected, [table, head]), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted)


def test_largest_norm() -> None:
    """With `max_norm`, quantities belong to the rows as torch renormalised them."""
    model, loss_fn = extended(nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 3)).double())
    backward(model, loss_fn, x := tokens(4, 5, 2), tokens(3, 5), E.BatchGrad(), E.DiagGGNExact())
    assert (model[0].weight[x].norm(dim=-1) <= 0.5).all()
    torch.testing.assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)


# ---- large vocabularies ------------------------------------------------------------------------------
def test_large_vocabulary() -> None:
    """50,000 rows: no extension but those that return `[N, vocab, D]` needs memory for every sample."""
    vocab, d = 50_000, 16
    model, loss_fn = extended(nn.Sequential(nn.Embedding(vocab, d), nn.Flatten(), nn.Linear(5 * d, 3)))
    x, y = tokens(vocab, 8, 5), tokens(3, 8)
    reduced = (E.SumGradSquared, E.BatchL2Grad, E.Variance, E.DiagGGNExact, E.DiagGGNMC, E.DiagHessian, E.KFAC, E.KFLR)
    largest = Largest()
    with largest:
        backward(model, loss_fn, x, y, *[e() for e in reduced], E.GGNMP())
    table = model[0].weight
    assert largest.numel <= 2 * table.numel()
    assert table.kflr[1].is_sparse and table.kflr[1].shape == (vocab, vocab)
    counts = torch.bincount(x.flatten(), minlength=vocab) / len(x)
    entries = table.kflr[1].coalesce()
    torch.testing.assert_close(entries.values(), counts[entries.indices()[0]])
    backward(model, loss_fn, x, y, E.BatchGrad())
    torch.testing.assert_close(table.sum_grad_squared, table.grad_batch.square().sum(0))
    torch.testing.assert_close(table.batch_l2, table.grad_batch.flatten(1).square().sum(1))
    product = table.ggnmp(torch.randn(2, vocab, d))
    assert product.shape == (2, vocab, d)


class Largest(TorchDispatchMode):
    """Looks for the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [out.numel()] if isinstance(out, Tensor) and not out.is_sparse else [0]
        self.numel = max(self.numel, *found)
        return out


@pytest.mark.parametrize("approximation", ["default", "expand", "reduce"])
def test_sparse_input_factor_is_the_dense_one(approximation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = REGISTRY.find(nn.Embedding)
    layer, x = nn.Embedding(6, 2, padding_idx=2).double(), tokens(6, 4, 5)
    call = Call.of(layer, x, params=("weight",))
    dense = rule.kron_input(call, "weight", approximation)
    onehot = F.one_hot(x, 6).double() * (x != 2)[..., None]
    expected = {
        "default": torch.einsum("nti,ntj->ij", onehot, onehot) / 4,
        "expand": torch.einsum("nti,ntj->ij", onehot, onehot) / 20,
        "reduce": torch.einsum("ni,nj->ij", onehot.mean(1), onehot.mean(1)) / 4,
    }
    torch.testing.assert_close(dense, expected[approximation])
    monkeypatch.setattr(embedding, "DENSE", 3)
    sparse = rule.kron_input(call, "weight", approximation)
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), dense)


# ---- refusals ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("extension", [*FIRST_ORDER, E.DiagGGNExact, E.KFAC, E.HMP], ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    ("layer", "options", "reason"),
    [
        (nn.Embedding, {"sparse": True}, embedding.SPARSE),
        (nn.Embedding, {"scale_grad_by_freq": True}, embedding.FREQUENCY),
        (nn.EmbeddingBag, {"mode": "sum", "sparse": True}, embedding.SPARSE),
        (nn.EmbeddingBag, {"mode": "sum", "scale_grad_by_freq": True}, embedding.FREQUENCY),
    ],
)
def test_refused_options(
    extension: type[BackpropExtension], layer: type[nn.Module], options: dict[str, Any], reason: str
) -> None:
    """Where autograd's gradient is none of the loss, or no dense tensor, the reason and the way out are given."""
    width = 2 if layer is nn.EmbeddingBag else 6
    model, loss_fn = extended(nn.Sequential(layer(4, 2, **options), nn.Flatten(), nn.Linear(width, 3)))
    x, y = tokens(4, 5, 3), tokens(3, 5)
    loss_fn(model(x), y).backward()  # without an extension, nothing is refused
    with pytest.raises(UnsupportedLayer) as error:
        backward(model, loss_fn, x, y, extension())
    assert reason in str(error.value) and "=False" in str(error.value)
