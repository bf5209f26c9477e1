"""Weights that functions compute: rows that are products with the other operand are those of row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.plan import broadcast, spread_rows
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.stretches.products import StretchProducts
from tests.helpers import backward
from tests.references.compare import ON_ANY_GRAPH, agrees, rand
from tests.references.reference import Reference

N, T, D = 18, 3, 4
"""More samples than one power of two for each."""

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Computes(nn.Module):
    """A function of rows and two parameters, with a layer in front or on data as they are."""

    def __init__(self, function: Function, on_data: bool, shape: tuple[int, ...] = (D, D)) -> None:
        super().__init__()
        self.first = nn.Identity() if on_data else nn.Linear(D, D)
        self.w, self.b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(D))
        self.function = function
        self.last = nn.Linear(D, 3)
        self.register_buffer("fixed", torch.randn(N, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.w, self.b)).sum(1)


MASK = (torch.arange(D * D).reshape(D, D) % 3 > 0).double()

PRODUCTS: dict[str, Function] = {
    "masked": lambda x, w, b: F.linear(x, w * MASK, b),
    "masked, without positions": lambda x, w, b: F.linear(x[:, 0], w * MASK, b)[:, None],
    "normalised, without positions": lambda x, w, b: F.linear(x[:, 0], w / w.norm(dim=1, keepdim=True), b.exp())[
        :, None
    ],
    "standardised, turned, without positions": lambda x, w, b: (
        x[:, 0] @ ((w - w.mean(0)) / w.std(0)) + x[:, 1] @ w.sin().mT
    )[:, None],
    "softmax, on the left, without positions": lambda x, w, b: (w.softmax(1) @ x[:, 0].mT).mT[:, None] * b,
    "of all entries, without positions": lambda x, w, b: F.linear(x[:, 0], w / w.norm(), b)[:, None],
    "low rank, without positions": lambda x, w, b: F.linear(x[:, 0], w[:, :2] @ w[:, 2:].mT, b)[:, None],
    "of two, without positions": lambda x, w, b: F.linear(x[:, 0], w * b[:, None].exp(), b)[:, None],
    "normalised": lambda x, w, b: F.linear(x, w / w.norm(dim=1, keepdim=True), b.exp()),
    "standardised": lambda x, w, b: F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)),
    "low rank": lambda x, w, b: F.linear(x, w[:, :2] @ w[:, 2:].mT, b),
    "square": lambda x, w, b: x @ (w @ w),
    "on the left": lambda x, w, b: (w.sin() @ x[:, 0].mT).mT[:, None] + b,
    "on the left, side by side": lambda x, w, b: (w.sin() @ x.mT).mT + b,
    "time first": lambda x, w, b: F.linear(x.transpose(0, 1), w.sin(), b).transpose(0, 1),
    "scaled": lambda x, w, b: torch.addmm(b.exp(), x.flatten(0, 1), w.sin(), alpha=0.5, beta=2).view(x.shape),
    "by position": lambda x, w, b: torch.einsum("nti,tio->nto", x, torch.stack([w, w.sin(), w * w])),
    "by position, turned": lambda x, w, b: torch.einsum("nti,toi->nto", x, torch.stack([w, w.sin(), w * w])),
    "kernel": lambda x, w, b: F.conv1d(x.mT, (w * MASK)[..., None].expand(-1, -1, 3), b, padding=1).mT,
    "kernel of groups": lambda x, w, b: F.conv1d(x.mT, w.sin()[:, None, :3], b.exp(), padding=1, groups=D).mT,
    "kernel of windows": lambda x, w, b: F.conv1d(x.reshape(-1, D)[..., None], w.sin()[..., None], b.exp()).view(
        len(x), -1, D
    ),
    "kernel of windows, these first": lambda x, w, b: (
        F.conv1d(x.transpose(0, 1).reshape(-1, D)[..., None], w.sin()[..., None], b.exp())
        .view(-1, len(x), D)
        .transpose(0, 1)
    ),
    "transposed kernel": lambda x, w, b: F.conv_transpose1d(x.mT, w.sin()[..., None], b).mT,
    "twice": lambda x, w, b: F.linear(F.linear(x, w * MASK).tanh(), (w * MASK).mT, b),
    "of several": lambda x, w, b: F.linear(x, w * b[:, None], b),
    "complex": lambda x, w, b: (x.to(torch.complex128) @ torch.complex(w, w.sin())).abs(),
    "as it is and computed": lambda x, w, b: x @ w + x.sin() @ (2 * w).mT,
}


def rows(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    backward(bpk.extend(model), loss_fn, x, torch.arange(N) % 3, E.BatchGrad(), E.SqrtGGNExact())
    fields = ("grad_batch", "sqrt_ggn_exact")
    return {f"{name} {f}": getattr(p, f) for name, p in model.named_parameters() for f in fields if hasattr(p, f)}


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many parameters rows take a pass for each sample."""
    counted: list[int] = []
    found = StretchCall.spread

    def spy(self: StretchCall, mat: Tensor) -> broadcast.BroadcastRows:
        known = found(self, mat)
        counted.append(len(self.source.trained) - len(known.places))
        return known

    monkeypatch.setattr(StretchCall, "spread", spy)
    return counted


def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast.SpreadPlaces, "along_rows", lambda *given: {})
    monkeypatch.setattr(broadcast.SpreadPlaces, "candidates", lambda *given: [])


def same_row_by_row(model: nn.Module, x: Tensor, found: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those that a pass for each sample finds."""
    row_by_row(monkeypatch)
    expected = rows(model, x)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], msg=key)


@pytest.mark.parametrize("on_data", [False, True], ids=["behind a layer", "on data"])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_are_those_of_row_by_row(name: str, on_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Computes(PRODUCTS[name], on_data).double(), rand(N, T, D)
    passes = count_passes(monkeypatch)
    found = rows(model, x)
    assert not any(passes), "no parameter takes a pass for each sample"
    same_row_by_row(model, x, found, monkeypatch)


MIXING: dict[str, Function] = {
    "rows far away": lambda x, w, b: (y := F.linear(x, w.sin(), b)) - 0.5 * y.roll(16, 0),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_that_feed_several_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at the end are those of the function's result no more: there is a pass for each row at the end."""
    torch.manual_seed(0)
    model, x, y = Computes(MIXING[name], on_data=True).double(), rand(N, T, D), torch.arange(N) % 3
    passes = count_passes(monkeypatch)
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagGGNExact())
    found = model.w.diag_ggn_exact
    assert any(passes)
    row_by_row(monkeypatch)
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagGGNExact())
    torch.testing.assert_close(found, model.w.diag_ggn_exact)


class OfConstants(Computes):
    """A product with constants that are no data, as many as there are samples; what comes of it is spread."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.fixed, Tensor)
        return self.last(self.first(x) + (self.fixed @ self.w.sin()).mean(0) * self.b).sum(1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_constants_that_are_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = OfConstants(PRODUCTS["masked"], on_data=False).double(), rand(N, T, D)
    passes = count_passes(monkeypatch)
    found = rows(model, x)
    assert not any(passes)
    same_row_by_row(model, x, found, monkeypatch)


class Row(Computes):
    """A parameter with a row for each sample, in a product: it belongs to that sample alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + (self.w @ self.b.exp().diag())[:, None]).sum(1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Row(PRODUCTS["masked"], on_data=False, shape=(N, D)).double(), rand(N, T, D)
    same_row_by_row(model, x, rows(model, x), monkeypatch)


BOTH_WAYS: dict[str, Function] = {
    "both operands": lambda x, w, b: x + (torch.where(x > 0, w[0], w[1]) @ w.sin()) * b,
    "a sum behind a product": lambda x, w, b: x + (F.linear(x, w.sin()) - torch.where(x > 0, w[0], w[1])) * b,
    "a product with a matrix that keeps rows": lambda x, w, b: (
        x + (torch.eye(N, dtype=x.dtype) @ (x[:, 0] @ w.sin() - torch.where(x[:, 0] > 0, w[0], w[1])))[:, None]
    ),
    "a product behind a product": lambda x, w, b: x + (torch.where(x > 0, w[0], w[1]) * F.linear(x, w.sin())) @ w,
}


@pytest.mark.parametrize("on_data", [False, True], ids=["behind a layer", "on data"])
@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_comes_by_two_ways_counts_once(name: str, on_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of data may be taken for those of parameters alone, and lead past a product of the same parameter."""
    torch.manual_seed(0)
    model, x = Computes(BOTH_WAYS[name], on_data).double(), rand(N, T, D)
    same_row_by_row(model, x, rows(model, x), monkeypatch)


class OfSeveralStretches(Computes):
    """A product with data whose rows one stretch adds to those of a layer, and another one averages."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.fixed, Tensor)
        product = self.fixed @ self.w.sin()
        total = product + self.first(x[:, 0])  # a call of its own
        return self.last(total * self.b * (1 + 0.1 * product.mean(0)))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_product_that_several_stretches_lead_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd brings it the gradients of both: those of the mean belong to a sample each, and to no row."""
    torch.manual_seed(0)
    model, x = OfSeveralStretches(PRODUCTS["masked"], on_data=False).double(), rand(N, T, D)
    same_row_by_row(model, x, rows(model, x), monkeypatch)


class BesideAnother(Computes):
    """One stretch adds a bias, which autograd could bring; another one reads that sum, and a weight row by row."""

    def forward(self, x: Tensor) -> Tensor:
        x = (self.w.sin() @ self.first(x).mT).mT.tanh()
        total = F.linear(x, self.v * MASK, self.b)
        return self.last((total + x * total.sigmoid()).tanh()).sum(1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_bias_that_a_stretch_shares_with_one_left_to_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd brings what comes from both: then neither may be asked for it again."""
    torch.manual_seed(0)
    model, x = BesideAnother(PRODUCTS["masked"], on_data=False), rand(N, T, D)
    model.v = nn.Parameter(torch.randn(D, D))
    same_row_by_row(model.double(), x, rows(model, x), monkeypatch)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_quantity_agrees_with_autograd(name: str) -> None:
    model, x, y = Computes(PRODUCTS[name], on_data=False).double(), rand(3, T, D), torch.randint(3, (3,))
    if torch.autograd.grad(model(x).sum(), model.b, allow_unused=True)[0] is None:
        del model.b
        model.b = torch.zeros(D)
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors=False)


SQUARES = (E.BatchL2Grad, E.SumGradSquared, E.Variance, E.DiagGGNExact, E.BatchDiagGGNExact, E.DiagHessian)


@pytest.mark.parametrize("options", [{}, {"subsampling": [3, 0, 4]}, {"subsampling": []}], ids=str)
@pytest.mark.parametrize("piece", [1, 200], ids=["columns", "samples"])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_squares_in_pieces(name: str, piece: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares are those of all rows at once, where rows exist for some samples, or some columns of one, at a time."""
    torch.manual_seed(0)
    model, x, y = bpk.extend(Computes(PRODUCTS[name], on_data=False).double()), rand(5, T, D), torch.arange(5) % 3
    loss_fn, params = bpk.extend(nn.CrossEntropyLoss()), dict(model.named_parameters())
    ours = [e(**options) for e in SQUARES]
    backward(model, loss_fn, x, y, *ours, E.BatchGrad(**options), E.SqrtGGNExact(**options))
    expected = {(k, e.savefield): getattr(p, e.savefield, None) for k, p in params.items() for e in ours}
    monkeypatch.setattr(spread_rows, "PIECE", piece)
    backward(model, loss_fn, x, y, *ours)
    for (k, field), value in expected.items():
        torch.testing.assert_close(getattr(params[k], field, None), value, msg=f"{k} {field}")


def parametrised() -> dict[str, nn.Module]:
    conv, linear = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Linear(4 * 16, 3)
    return {
        "weight_norm": nn.Sequential(
            parametrizations.weight_norm(conv), nn.Tanh(), nn.Flatten(), parametrizations.weight_norm(linear)
        ),
        "spectral_norm": nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(2, 4, 3, padding=1)), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
        ).eval(),
    }


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_parametrised_layers_take_no_pass_for_each_sample(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = parametrised()[kind].double()
    x, y = rand(5, 2, 4, 4), torch.arange(5) % 3
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    passes = count_passes(monkeypatch)
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    assert passes and not any(passes)
    agrees(model, ref, factors=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_in_a_checkpoint() -> None:
    """What it computes again is handed out once: rows come one by one."""
    torch.manual_seed(0)
    model, x = Computes(PRODUCTS["normalised"], on_data=False).double(), rand(N, T, D)
    found = rows(model, x)
    inner = model.function
    model.function = lambda *given: checkpoint(inner, *given, use_reentrant=False)
    for key, value in rows(model, x).items():
        torch.testing.assert_close(value, found[key], msg=key)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_in_a_shorter_format() -> None:
    torch.manual_seed(0)
    model, x = Computes(PRODUCTS["normalised"], on_data=False), torch.randn(N, T, D)
    found = rows(model, x)
    inner = model.function

    def shorter(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*given).float()

    model.function = shorter
    for key, value in rows(model, x).items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, found[key], rtol=0.1, atol=0.02, msg=key)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_curvature_of_a_normalised_weight_is_found_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of different rows are not coupled: there is a product for each entry of a row."""
    torch.manual_seed(0)
    linear = parametrizations.weight_norm(nn.Linear(6, 40))
    model, x, y = nn.Sequential(linear, nn.Tanh(), nn.Linear(40, 3)).double(), rand(5, 6), torch.arange(5) % 3
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    asked: list[int] = []
    product = StretchProducts.product

    def spy(self: StretchProducts, mats: Any) -> list[Tensor]:
        asked.append(len(mats[0]))
        return product(self, mats)

    monkeypatch.setattr(StretchProducts, "product", spy)
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagHessian())
    assert sum(asked) < 40
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_h, ref.diag_h(name), msg=name)
