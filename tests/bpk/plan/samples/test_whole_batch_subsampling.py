"""Some samples, and several losses, of a batch whose samples mix."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.bpk.plan.samples.test_whole_batch import MODELS, PER_SAMPLE, SUMS, Reference, Sequences, agree, problem, run


def options_of(thing: object) -> Iterable[str]:
    """The arguments that an extension takes."""
    return inspect.signature(thing).parameters if inspect.isclass(thing) else ()


class Branches(nn.Module):
    """A trunk, one prediction behind which samples are apart, and others behind which they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.apart, self.normed, self.centred = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = torch.tanh(self.trunk(x)) * self.scale
        return [self.apart(h), self.normed(self.norm(h).sin()), self.centred(h.exp() * (h - h.mean(0)))]


class One(nn.Module):
    """One of the predictions."""

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__()
        self.model, self.number = model, number

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)[self.number]
        return out


@pytest.mark.parametrize("beside", [(), (E.BatchGrad, E.Variance)], ids=["alone", "beside first order"])
@pytest.mark.parametrize("one_pass", ["one forward pass", "a loss right behind its prediction"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 2), (2, 0), (0, 2, 1), (1, 0, 2), (2, 1, 0)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_losses_behind_some_of_which_samples_mix(order: tuple[int, ...], one_pass: str, beside: tuple) -> None:
    """Autograd begins with the loss that was computed last; whether samples mix there or elsewhere is all the same."""
    torch.manual_seed(0)
    model, x, y = Branches().double(), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    kinds = {0: nn.MSELoss(), 1: nn.CrossEntropyLoss(), 2: nn.MSELoss(reduction="sum")}
    targets = {0: y, 1: torch.tensor([0, 1, 1, 0, 1]), 2: 2 * y}
    factors = {0: 2.0, 1: 0.5, 2: 3.0}
    refs = [Reference(One(model, k), kinds[k], x, targets[k]) for k in order]
    net, losses = bpk.extend(model), {k: bpk.extend(kind) for k, kind in kinds.items()}
    with bpk.backpack(*[e() for e in SUMS], *[e() for e in beside]):
        if one_pass == "one forward pass":
            out = net(x)
            total = sum(factors[k] * losses[k](out[k], targets[k]) for k in order)
        else:
            total = sum(factors[k] * losses[k](net(x)[k], targets[k]) for k in order)
        total.backward()
    unused = {"apart", "normed", "centred", "norm"} - {("apart", "normed", "centred")[k] for k in order}
    for name, p in model.named_parameters():
        if name.partition(".")[0] in unused - ({"norm"} if 1 in order else set()):
            continue
        if beside:
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        key, unit = f"model.{name}", torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        ggn, full = (sum(factors[k] * getattr(r, of)[key] for k, r in zip(order, refs, strict=True)) for of in HALVES)
        torch.testing.assert_close(p.diag_ggn_exact.flatten(), ggn.diag(), msg=lambda m, n=name: f"GGN of {n}: {m}")
        torch.testing.assert_close(p.diag_h.flatten(), full.diag(), msg=lambda m, n=name: f"Hessian of {n}: {m}")
        torch.testing.assert_close(p.ggnmp(unit).flatten(1), ggn, msg=lambda m, n=name: f"GGNMP of {n}: {m}")
        torch.testing.assert_close(p.hmp(unit).flatten(1), full, msg=lambda m, n=name: f"HMP of {n}: {m}")


HALVES = ("ggn", "hessian")


def test_positive_curvature_of_several_losses() -> None:
    """The other order gives the same, and no less than the GGN."""
    found = []
    for order in ((0, 1, 2), (2, 1, 0)):
        torch.manual_seed(0)
        model, x, y = bpk.extend(Branches().double()), torch.randn(5, 3).double(), torch.randn(5, 2).double()
        losses = [bpk.extend(nn.MSELoss()) for _ in order]
        with bpk.backpack(E.PCHMP(), E.GGNMP()):
            out = model(x)
            sum(losses[k](out[k], y) for k in order).backward()
        units = [torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape) for p in model.parameters()]
        found.append([p.pchmp(unit).flatten(1) for p, unit in zip(model.parameters(), units, strict=True)])
        for p, unit, block in zip(model.parameters(), units, found[-1], strict=True):
            assert torch.linalg.eigvalsh(block - p.ggnmp(unit).flatten(1)).min() > -1e-9
    torch.testing.assert_close(found[0], found[1])


def test_models_of_their_own_behind_several_losses() -> None:
    model, loss_fn, x, y = problem("MLP")
    plain, other = bpk.extend(nn.Linear(3, 2).double()), bpk.extend(nn.CrossEntropyLoss())
    refs = Reference(model, loss_fn, x, y), Reference(plain, other, x, y)
    model, loss_fn = bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(*[e() for e in SUMS]):
        mixed = loss_fn(model(x), y)
        apart = other(plain(x), y)  # the later one: autograd begins there
        (mixed + apart).backward()
    for net, ref in zip((model, plain), refs, strict=True):
        agree(net, ref)


@pytest.mark.parametrize("extension", PER_SAMPLE, ids=lambda e: e.__name__)
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 2)], ids=str)
def test_those_of_samples_are_refused_behind_several_losses(extension: type, order: tuple[int, ...]) -> None:
    model, x, y = bpk.extend(Branches()), torch.randn(5, 3), torch.randn(5, 2)
    losses = [bpk.extend(nn.MSELoss()) for _ in order]
    with bpk.backpack(E.DiagGGNExact(), extension()), pytest.raises(NotImplementedError, match=r"(?s)mix.*Do:"):
        out = model(x)
        sum(loss(out[k], y) for loss, k in zip(losses, order, strict=True)).backward()


@cache
def of_whole_batch(name: str, loss: str) -> Reference:
    """The reference of a problem, which is the same for all choices of samples."""
    return Reference(*problem(name, loss))


class Terms(nn.Module):
    """Some terms of a loss that is a mean over `n` samples, each as often as it is named."""

    def __init__(self, loss_fn: nn.Module, chosen: list[int]) -> None:
        super().__init__()
        self.loss_fn, self.chosen = loss_fn, chosen

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(out[self.chosen], y[self.chosen]) * len(self.chosen) / len(out)


@pytest.mark.parametrize("chosen", [[0], [2, 1], [3, 3, 0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("loss", ["CE", "MSE"])
@pytest.mark.parametrize("name", MODELS)
def test_subsampling_is_of_terms_of_the_loss(name: str, loss: str, chosen: list[int]) -> None:
    """The chosen samples' terms, as functions of the whole batch."""
    model, loss_fn, x, y = problem(name, loss)
    whole, some = of_whole_batch(name, loss), Reference(model, Terms(loss_fn, chosen), x, y)
    exact, product = E.DiagGGNExact(subsampling=chosen), E.GGNMP(savefield="some", subsampling=chosen)
    run(model, loss_fn, x, y, exact, product, E.GGNMP(), E.HMP())
    for key, p in model.named_parameters():
        unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        torch.testing.assert_close(p.diag_ggn_exact.flatten(), some.ggn[key].diag())
        torch.testing.assert_close(p.some(unit).flatten(1), some.ggn[key])
        torch.testing.assert_close(p.ggnmp(unit).flatten(1), whole.ggn[key])
        torch.testing.assert_close(p.hmp(unit).flatten(1), whole.hessian[key])


def test_subsampling_of_several_losses_is_additive() -> None:
    """Over all samples one by one, the quantities of two losses sum to those of the batch; over none they are zero."""
    torch.manual_seed(0)
    model, x, y = bpk.extend(Branches().double()), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    losses = [bpk.extend(nn.MSELoss()) for _ in range(2)]
    found: dict[str, Tensor] = {}
    for name, chosen in {"all": None, "none": [], **{str(n): [n] for n in range(5)}}.items():
        with bpk.backpack(E.DiagGGNExact(subsampling=chosen)):
            out = model(x)
            (losses[0](out[0], y) + 2 * losses[1](out[2], y)).backward()
        found[name] = model.trunk.weight.diag_ggn_exact.clone()
    assert not found.pop("none").any()
    torch.testing.assert_close(found.pop("all"), torch.stack(list(found.values())).sum(0))


@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"memory": 2000}], ids=str)
def test_subsampling_a_few_columns_at_a_time(options: dict[str, int]) -> None:
    parts = problem("ConvNet")
    some = Reference(parts[0], Terms(parts[1], [1, 3]), *parts[2:])
    run(*parts, E.DiagGGNExact(subsampling=[1, 3]), **options)
    for key, p in parts[0].named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact.flatten(), some.ggn[key].diag())


def test_subsampling_of_sampled_columns() -> None:
    parts = problem("MLP")
    some = Reference(parts[0], Terms(parts[1], [1, 3, 3]), *parts[2:])
    run(*parts, E.DiagGGNMC(mc_samples=20_000, subsampling=[1, 3, 3]))
    for key, p in parts[0].named_parameters():
        expected = some.ggn[key].diag()
        assert (p.diag_ggn_mc.flatten() - expected).norm() <= 0.06 * expected.norm() + 1e-12, key


@pytest.mark.parametrize("extension", [E.DiagHessian, E.HMP, E.PCHMP])
def test_subsampling_that_needs_gradients_is_refused(extension: type) -> None:
    with pytest.raises(NotImplementedError, match=r"(?s)mixes samples.*the gradient of some terms.*subsampling"):
        run(*problem("MLP"), extension(subsampling=[0]))
    with pytest.raises(NotImplementedError, match="Rows are not samples"):
        run(*problem("functions"), extension(subsampling=[0]))


class Folded(Sequences):
    """A row for each position, at the loss, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).flatten(0, 1)))


def test_subsampling_of_rows_that_are_no_samples_is_refused() -> None:
    x, y = torch.randn(4, 3, 3), torch.randn(12, 2)
    with pytest.raises(NotImplementedError, match="nothing tells which sample each of its 12 rows"):
        run(Folded(), nn.MSELoss(), x, y, E.DiagGGNExact(subsampling=[0]))
    run(Folded(), nn.MSELoss(), x, y, E.DiagGGNExact())


def test_two_losses() -> None:
    parts = problem("MLP")
    model, loss_fn = bpk.extend(parts[0]), bpk.extend(parts[1])
    other = bpk.extend(nn.MSELoss())
    x, y = parts[2:]
    target = torch.randn(4, 2, dtype=torch.float64)
    with bpk.backpack(*[e() for e in SUMS]):
        out = model(x)
        (2 * loss_fn(out, y) + 3 * other(out, target)).backward()

    class Both(nn.Module):
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return 2 * F.cross_entropy(out, y) + 3 * F.mse_loss(out, target)

    agree(model, Reference(model, Both(), x, y))


class OverSteps(nn.Module):
    """Layers whose products need not take an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.slopes = nn.Embedding(5, 4), nn.LayerNorm(4), nn.PReLU(3)
        self.recurrent, self.last = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x))
        h = self.slopes(self.recurrent(h + self.attention(h, h, h)[0])[0])
        return self.last(h.sin()).mean(1)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("extension", [c for c in E.__dict__.values() if "subsampling" in options_of(c)])
def test_sums_over_no_samples_are_zero(extension: type[E.BackpropExtension], steps: bool) -> None:
    if extension.averages:
        with pytest.raises(ValueError, match="names no sample"):
            extension(subsampling=[])
        return
    model = OverSteps() if steps else nn.Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, 2))
    model, loss_fn, asked = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), extension(subsampling=[])
    x = torch.randint(5, (4, 3)) if steps else torch.randn(4, 3)
    with bpk.backpack(asked):
        loss_fn(model(x), torch.tensor([0, 1, 1, 0])).backward()
    for p in model.parameters():
        value = vars(p)[asked.savefield]
        value = value(torch.randn_like(p)) if callable(value) else value
        assert all(not x.any() for x in (value if isinstance(value, list) else [value]))
