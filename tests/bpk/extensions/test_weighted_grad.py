"""Weighted and clipped sums of individual gradients: what is one norm, what is kept, what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import bpk
from bpk import extensions as E
from bpk.fields import rows, squares, statistics, totals
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import backward, data, extended


def individual(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """`[N, *p]`: the gradients of the samples' own losses, by a loop of plain autograd."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(loss(model(a), b), [*named.values()]) for a, b in zip(x.split(1), y.split(1), strict=True)
    ]
    return {name: torch.stack(part) for name, part in zip(named, zip(*rows, strict=True), strict=True)}


def clipped(each: dict[str, Tensor], most: float) -> dict[str, Tensor]:
    """Their clipped mean."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
    factors = (most / norms).clamp(max=1)
    assert 0 < (factors < 1).sum() < len(norms), "some are clipped, and some are not"
    return {name: torch.tensordot(factors, g, 1) / len(g) for name, g in each.items()}


class Reused(nn.Module):
    """A layer that is called twice, a tied weight, a parameter of its own, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.tied, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.tied.weight = self.twice.weight
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tied(self.twice(self.twice(x).tanh()).sigmoid()) * self.scale)


class Positions(nn.Module):
    """Rows of several positions, merged with the batch axis; a table that is tied to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.norm = nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.read = nn.Linear(4, 6, bias=False)
        self.read.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.mix(x.flatten(0, 1)).reshape(x.shape).tanh()
        return self.read(self.norm(x)).mean(1)


def tokens(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(6, (n, 3)), torch.randint(6, (n,))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), data),
    "reused": (Reused, data),
    "positions": (Positions, tokens),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Conv1d(3, 3, 2), nn.Flatten(), nn.Linear(6, 3)),
        lambda: (torch.randn(5, 1, 4, dtype=torch.float64), torch.randint(3, (5,))),
    ),
}


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("together", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("pieces", [None, 1], ids=["at once", "sample by sample"])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_norm_over_all_parameters(
    name: str, pieces: int | None, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contributions of several uses are added before the norm is taken, also where few rows exist at a time."""
    if pieces is not None:
        monkeypatch.setattr(squares, "PIECE", pieces)
        monkeypatch.setattr(rows, "PIECE", pieces)
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    model, (x, y) = make().double(), draw()
    each = individual(model, nn.CrossEntropyLoss(), x, y)
    quartile = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt().median() * 1.01
    expected = clipped(each, float(quartile))
    model, loss_fn = extended(model)
    extension = E.ClippedGrad(float(quartile))
    others = (E.BatchGrad(), E.BatchL2Grad(), E.SumGradSquared(), E.DiagGGNExact()) if together else ()
    backward(model, loss_fn, x, y, extension, *others)
    for key, p in model.named_parameters():
        assert hasattr(p, "clipped_grad") == p.requires_grad
        if p.requires_grad:
            torch.testing.assert_close(p.clipped_grad, expected[key])
    norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
    assert extension.norms is not None
    torch.testing.assert_close(extension.norms, norms)


def test_each_parameter_by_itself() -> None:
    torch.manual_seed(0)
    model, loss_fn = extended()
    x, y = data()
    each = individual(model, nn.CrossEntropyLoss(), x, y)
    extension = E.ClippedGrad(0.2, per="layer")
    backward(model, loss_fn, x, y, extension)
    for name, p in model.named_parameters():
        factors = (0.2 / each[name].flatten(1).norm(dim=1)).clamp(max=1)
        torch.testing.assert_close(p.clipped_grad, torch.tensordot(factors, each[name], 1) / len(x))
    assert extension.norms is None


def test_the_objective_may_be_a_sum() -> None:
    """The same norms; the field is a sum then."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), *data()
    found = []
    for reduction in ("mean", "sum"):
        net, loss_fn = extended(model, nn.CrossEntropyLoss(reduction=reduction))
        backward(net, loss_fn, x, y, E.ClippedGrad(0.9, loss_reduction=reduction))
        found.append(model.weight.clipped_grad)
    torch.testing.assert_close(len(x) * found[0], found[1])


def test_an_infinite_norm_clips_nothing() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.ClippedGrad(float("inf")))
    for p in model.parameters():
        torch.testing.assert_close(p.clipped_grad, p.grad)


def test_weights_that_are_given() -> None:
    model, loss_fn = extended()
    x, y = data()
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    backward(model, loss_fn, x, y, E.WeightedGrad(weights), E.BatchGrad())
    for p in model.parameters():
        torch.testing.assert_close(p.weighted_grad, torch.tensordot(weights, p.grad_batch, 1))
    backward(model, loss_fn, x, y, E.WeightedGrad([1.0] * 5))
    for p in model.parameters():
        torch.testing.assert_close(2 * p.weighted_grad, p.grad)


@pytest.mark.parametrize(
    "weights",
    [[1.0], lambda norms: norms.sum(), lambda norms: 1.0, torch.ones(5, 1)],
    ids=["few", "sum", "one", "matrix"],
)
def test_weights_of_another_shape_are_refused(weights: Any) -> None:
    model, loss_fn = extended()
    with pytest.raises(ValueError, match=r"WeightedGrad got weights .* for 5 samples(?s:.*)Why: (?s:.*)Do: "):
        backward(model, loss_fn, *data(), E.WeightedGrad(weights))
    assert not any(hasattr(p, "weighted_grad") for p in model.parameters())


@pytest.mark.parametrize(
    "options", [{"max_norm": 0.0}, {"max_norm": float("nan")}, {"per": "batch"}, {"loss_reduction": ""}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        E.ClippedGrad(**options)


# ---- where samples mix ---------------------------------------------------------------------------------
class Centred(nn.Module):
    """Functions mix samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last((x - x.mean(0)).tanh())


@pytest.mark.filterwarnings("ignore:Rows are not", "ignore:Layer")
@pytest.mark.parametrize("beside", [(), (E.BatchGrad,), (E.DiagGGNExact,)], ids=["alone", "BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize("mixes", ["layer", "function"])
def test_refused_where_samples_mix(mixes: str, beside: tuple[type, ...]) -> None:
    """Also if others have been there before, who follow the chain rule, or are sums over the batch."""
    model = Centred() if mixes == "function" else nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model, loss_fn = extended(model.double())
    for extensions in ((E.BatchGrad(),), (E.ClippedGrad(), *(e() for e in beside))):
        try:
            backward(model, loss_fn, *data(), *extensions)
        except UnsupportedLayer as error:
            assert "Why: " in str(error) and "Do: " in str(error)
            assert len(extensions) > 1 or isinstance(extensions[0], E.ClippedGrad)
            break
    else:
        raise AssertionError("not refused")
    assert not any(hasattr(p, "clipped_grad") for p in model.parameters())


# ---- life cycle ----------------------------------------------------------------------------------------
def test_hooks_see_all_fields_of_a_module() -> None:
    model, loss_fn = extended()
    seen: list[str] = []

    def hook(module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        assert all(hasattr(p, "clipped_grad") and hasattr(p, "batch_l2") for p in own)
        seen.append(type(module).__name__)
        for p in own:
            del p.clipped_grad

    backward(model, loss_fn, *data(), E.ClippedGrad(), E.BatchL2Grad(), extension_hook=hook)
    assert seen.count("Linear") == 2 and seen[-1] == "Sequential"
    assert not any(hasattr(p, "clipped_grad") for p in model.parameters())


class Remembering(nn.Module):
    """Remembers the memory that passes, without keeping it."""

    def __init__(self, seen: list[StorageWeakRef]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(StorageWeakRef(x.untyped_storage()))
        x.register_hook(lambda grad: self.seen.append(StorageWeakRef(grad.untyped_storage())))
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_for_the_norms_is_let_go(fails: bool) -> None:
    """At the end of the pass, and where it fails half-way."""
    seen: list[StorageWeakRef] = []

    def fail(grad: Tensor) -> None:
        if fails:
            raise KeyError("half-way")

    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), Remembering(seen), nn.Linear(6, 5), Remembering(seen), nn.Linear(5, 3)
    )
    model, loss_fn = extended(model.double())
    x, y = data()
    x.requires_grad_().register_hook(fail)
    try:
        backward(model, loss_fn, x, y, E.ClippedGrad())
    except KeyError:
        assert fails and not any(hasattr(p, "clipped_grad") for p in model.parameters())
    gc.collect()
    assert len(seen) == 4 and all(ref.expired() for ref in seen)


def test_no_more_is_kept_than_the_sums_need() -> None:
    """Outputs go with their layer, and what a sum was made of goes before the next sum, while the loss is alive."""
    outputs: list[StorageWeakRef] = []
    inputs: list[StorageWeakRef] = []
    alive: list[tuple[int, int]] = []

    def count() -> tuple[int, int]:
        gc.collect()
        return sum(not s.expired() for s in outputs), sum(not s.expired() for s in inputs)

    class Counting(E.ClippedGrad):
        def value(self, uses: statistics.Uses) -> Tensor:
            alive.append(count())
            return super().value(uses)

    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model, loss_fn = extended(model.double())
    for layer, seen in zip(model, (outputs, inputs) * 3, strict=False):
        layer.register_forward_hook(lambda m, x, out, seen=seen: seen.append(StorageWeakRef(out.untyped_storage())))
    x, y = data()
    with bpk.backpack(Counting()):
        loss = loss_fn(model(x), y)
        loss.backward()
    assert alive[0] == (0, 2) and alive[-1] == (0, 0)
    assert count() == (0, 0) and loss.requires_grad


def test_individual_gradients_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what a layer has read takes less memory; rows where these do."""
    kept: list[int] = []
    lean = totals.lean

    def spy(uses: Uses) -> Uses | dict[Hashable, Tensor]:
        found = lean(uses)
        kept.append(sum(r.numel() for r in found.values()) if isinstance(found, dict) else 0)
        return found

    monkeypatch.setattr(totals, "lean", spy)
    model, loss_fn = extended(
        nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(60, 50), nn.Linear(50, 3)).double()
    )
    backward(model, loss_fn, torch.randn(5, 1, 32).double(), data()[1], E.ClippedGrad())
    assert sorted(kept) == [0, 0, 10, 15, 30, 250], "two weights of linear layers are summed from what was read"


def test_derivatives_of_clipped_sums() -> None:
    """Also where a gradient is zero, whose norm has no derivative."""
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(4, 3).double(), data()
    x[0] = 0
    model.bias = None
    net, loss_fn = extended(model)
    with bpk.backpack(E.ClippedGrad(0.5)):
        loss_fn(net(x), y).backward(create_graph=True)
    found = torch.autograd.grad(model.weight.clipped_grad.square().sum(), model.weight)[0]

    def expected(weight: Tensor) -> Tensor:
        def one(a: Tensor, b: Tensor) -> Tensor:
            return nn.functional.cross_entropy(a[None] @ weight.T, b[None])

        total = torch.zeros_like(weight)
        for a, b in zip(x, y, strict=True):
            g = torch.autograd.grad(one(a, b), weight, create_graph=True)[0]
            size = float(g.detach().norm())
            total = total + (g * 0.5 / g.norm() if size > 0.5 else g) / len(x)
        return total.square().sum()

    weight = model.weight.detach().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(expected(weight), weight)[0])


def test_batches_of_different_sizes_are_refused() -> None:
    """There is no norm over all parameters."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x)

    model, loss_fn = extended(Pair().double())
    other = bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(UnsupportedLayer, match=r"Why: (?s:.*)Do: "), bpk.backpack(E.ClippedGrad()):
        (loss_fn(model.one(data()[0]), data()[1]) + other(model.other(data(n=3)[0]), data(n=3)[1])).backward()


class Negated(E.WeightedGrad):
    """Weighted gradients that are negated for vectors: parameters must stay apart."""

    def value(self, uses: Uses) -> Tensor:
        found = super().value(uses)
        return -found if uses.param.dim() == 1 else found


def test_small_parameters_together() -> None:
    """Small rows are weighted side by side; fields have memory of their own, and other values stay apart."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Unflatten(1, (1, 5)), nn.Linear(5, 3))
    (x, y), weights = data(torch.float32, 8), lambda norms: 1 / (1 + norms)
    model, loss_fn = extended(nn.Sequential(*net, nn.Flatten()))
    backward(model, loss_fn, x, y, E.WeightedGrad(weights))
    found = [p.weighted_grad for p in model.parameters()]
    assert len({part.untyped_storage().data_ptr() for part in found}) == len(found)
    each = individual(model, nn.CrossEntropyLoss(), x, y)
    factors = weights(torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt())
    for part, g in zip(found, each.values(), strict=True):
        torch.testing.assert_close(part, torch.tensordot(factors, g, 1) / len(x))
    backward(model, loss_fn, x, y, Negated(weights))
    for before, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(p.weighted_grad, -before if p.dim() == 1 else before)


def test_opacus() -> None:
    """The same norms and sums as in Opacus."""
    grad_sample = pytest.importorskip("opacus.grad_sample")
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), data(torch.float32, 8)
    net, loss_fn = extended(model)
    extension = E.ClippedGrad(1.2)
    backward(net, loss_fn, x, y, extension)
    found = [p.clipped_grad for p in net.parameters()]
    theirs = grad_sample.GradSampleModule(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    theirs.load_state_dict({f"_module.{k}": v for k, v in net.state_dict().items()})
    nn.CrossEntropyLoss()(theirs(x), y).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in theirs.parameters()]).norm(dim=0)
    assert extension.norms is not None
    torch.testing.assert_close(extension.norms, norms)
    for mine, p in zip(found, theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, torch.tensordot((1.2 / norms).clamp(max=1), p.grad_sample, 1) / len(x))
