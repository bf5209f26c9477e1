"""`F.layer_norm(x, shape, self.weight, self.bias)` and its kind: all quantities, and factors, are those of a layer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.recording.graph import normalizations
from tests.references.compare import check, rand

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]
MEAN, VAR = torch.linspace(-1, 1, 2).double(), torch.linspace(0.5, 2, 2).double()


class Normalises(nn.Module):
    """A function of `[N, *shape]`, a weight and a bias; `first`: behind a layer."""

    def __init__(self, function: Function, shape: tuple[int, ...], weight: tuple[int, ...], first: bool = True) -> None:
        super().__init__()
        self.function = function
        self.first: nn.Module = nn.PReLU(init=0.5) if first else nn.Identity()
        self.weight, self.bias = nn.Parameter(torch.rand(weight) + 0.5), nn.Parameter(torch.randn(weight))
        self.last = nn.Linear(prod(shape[1:]), 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.function(self.first(x), self.weight, self.bias)).flatten(1))
        return found


CASES: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "features": (lambda x, w, b: F.layer_norm(x, (3,), w, b), (4, 3), (3,)),
    "positions": (lambda x, w, b: F.layer_norm(x, (3,), w, b, eps=0.1), (3, 2, 3), (3,)),
    "bias added later": (lambda x, w, b: F.layer_norm(x, (3,), w) + b, (3, 2, 3), (3,)),
    "two axes": (lambda x, w, b: F.layer_norm(x, (2, 3), w, b), (3, 2, 2, 3), (2, 3)),
    "time in front": (
        lambda x, w, b: F.layer_norm(x.transpose(0, 1), (3,), w, b).transpose(0, 1),
        (3, 2, 3),
        (3,),
    ),
    "groups": (lambda x, w, b: F.group_norm(x, 2, w, b, eps=0.1), (3, 4, 2), (4,)),
    "groups of images": (lambda x, w, b: F.group_norm(x, 1, w, b), (2, 2, 2, 2), (2,)),
    "running statistics": (
        lambda x, w, b: F.batch_norm(x, MEAN.to(w), VAR.to(w), w, b, False),
        (3, 2, 2),
        (2,),
    ),
    "samples last": (
        lambda x, w, b: F.batch_norm(x.permute(1, 2, 0), MEAN.to(w), VAR.to(w), w, b, False).permute(2, 0, 1),
        (3, 4, 2),
        (2,),
    ),
    "negative eps": (lambda x, w, b: F.layer_norm(x, (3,), w, b, eps=-1e-4), (3, 2, 3), (3,)),
    "groups with a negative eps": (lambda x, w, b: F.group_norm(x, 2, w, b, eps=-1e-4), (3, 4, 2), (4,)),
    "in another shape": (lambda x, w, b: F.layer_norm(x, (3,), w.flatten(), b.squeeze()), (3, 2, 3), (3, 1)),
    "scaled": (lambda x, w, b: F.layer_norm(x, (3,), 1 + w, b), (3, 2, 3), (3,)),
    "of one parameter": (lambda x, w, b: F.layer_norm(x, (3,), w, w) + b, (3, 2, 3), (3,)),
    "twice": (lambda x, w, b: F.layer_norm(F.layer_norm(x, (3,), w, b).sin(), (3,), w, b), (3, 2, 3), (3,)),
}
GENERIC = ("in another shape", "scaled", "of one parameter", "negative eps", "groups with a negative eps")
"""Weight and bias are not two parameters as they are, or no layer does it: autograd carries columns through."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions for which something stood."""
    found: list[str] = []
    make = normalizations.stand_in

    def spy(name: str) -> nn.Module:
        found.append(name)
        return make(name)

    monkeypatch.setattr(normalizations, "stand_in", spy)
    return found


def of_layer(shape: tuple[int, ...]) -> tuple[nn.Module, Normalises]:
    """Two networks alike: with a subclass of `nn.LayerNorm` that calls the function itself, and with the layer."""

    class Own(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    networks = []
    for kind in (nn.LayerNorm, Own):
        torch.manual_seed(0)
        norm = kind(shape[-1], eps=0.01)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        last = nn.Linear(prod(shape[1:]), 3)
        networks.append(nn.Sequential(nn.Linear(shape[-1], shape[-1]), norm, nn.Tanh(), nn.Flatten(), last).double())
    return networks[0], networks[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", [False, True], ids=["of data", "behind a layer"])
@pytest.mark.parametrize("name", CASES)
def test_everything(name: str, first: bool, served: list[str]) -> None:
    torch.manual_seed(0)
    function, shape, weight = CASES[name]
    check(Normalises(function, shape, weight, first).double(), rand(*shape), factors=False)
    assert bool(served) == (name not in GENERIC)


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3)], ids=str)
def test_a_layer_with_a_forward_of_its_own(shape: tuple[int, ...]) -> None:
    """It is told of nothing, and has the fields of the layer."""
    x, y = rand(*shape), torch.arange(4) % 3
    networks = of_layer(shape)
    quantities = E.KFLR(), E.KFRA(), E.EKFLR(), E.DiagHessian(), E.Variance(), E.BatchDiagGGNExact(), E.HMP()
    for model in networks:
        with bpk.backpack(*quantities):
            bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y).backward()
    for p, q in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        for field in ("kflr", "kfra", "diag_h", "variance", "diag_ggn_exact_batch"):
            torch.testing.assert_close(getattr(p, field), getattr(q, field))
        v = torch.ones_like(p)[None]
        torch.testing.assert_close(p.hmp(v), q.hmp(v))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["positions", "groups", "running statistics"])
def test_frozen_parameters(frozen: str, name: str, served: list[str]) -> None:
    torch.manual_seed(2)
    function, shape, weight = CASES[name]
    model = Normalises(function, shape, weight).double()
    getattr(model, frozen).requires_grad_(False)
    quantities = E.BatchGrad(), E.DiagHessian(), E.DiagGGNExact()
    found = bpk.verify(model, nn.CrossEntropyLoss(), rand(*shape), torch.arange(3), *quantities, raise_on_error=True)
    assert served and found.ok


@pytest.mark.parametrize("name", ["positions", "groups", "running statistics"])
def test_inside_of_a_checkpoint(name: str, served: list[str]) -> None:
    """What the node has saved is given out once in a pass, and computed again where it is read for second order."""
    torch.manual_seed(5)
    function, shape, weight = CASES[name]

    def again(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        found: Tensor = checkpoint(function, x, w, b, use_reentrant=False)
        return found

    plain, x, y = Normalises(function, shape, weight).double(), rand(*shape), torch.arange(3)
    other = Normalises(again, shape, weight).double()
    other.load_state_dict(plain.state_dict())
    for model in (plain, other):
        served.clear()
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
            bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y).backward()
        assert served
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        for field in ("grad_batch", "diag_ggn_exact", "diag_h"):
            torch.testing.assert_close(getattr(p, field), getattr(q, field))


@pytest.mark.parametrize("name", ["positions", "groups", "running statistics"])
def test_a_checkpoint_is_asked_once(name: str) -> None:
    """All that its node keeps is read at a time: each time, the checkpoint computes everything again."""
    function, shape, weight = CASES[name]
    calls = []

    def counted(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        calls.append(name)
        return function(x, w, b)

    def again(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        found: Tensor = checkpoint(counted, x, w, b, use_reentrant=False)
        return found

    model = bpk.extend(Normalises(again, shape, weight).double())
    calls.clear()
    with bpk.backpack(E.DiagHessian()):
        bpk.extend(nn.CrossEntropyLoss())(model(rand(*shape)), torch.arange(3)).backward()
    assert len(calls) == 4  # forward pass, what is read, gradients ahead of the backward pass, and that


@pytest.mark.parametrize("name", ["positions", "groups", "running statistics"])
def test_autocast(name: str, served: list[str]) -> None:
    torch.manual_seed(4)
    function, shape, weight = CASES[name]
    model, x, y = bpk.extend(Normalises(function, shape, weight)), torch.randn(shape), torch.arange(3)
    with bpk.backpack(E.BatchGrad(), E.SumGradSquared(), E.DiagGGNExact()):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        bpk.extend(nn.CrossEntropyLoss())(out.float(), y).backward()
    assert served
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, rtol=5e-2, atol=1e-2)
        torch.testing.assert_close(p.grad_batch.square().sum(0), p.sum_grad_squared, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.1])
def test_what_was_added_to_the_variances(eps: float, scale: float) -> None:
    """The node does not keep it. With what is found, `1 / std` is what it was, up to rounding."""
    torch.manual_seed(0)
    x = torch.randn(50, 7) * scale * torch.logspace(-3, 1, 50)[:, None]
    out = F.layer_norm(x, (7,), torch.ones(7, requires_grad=True), None, eps)
    rstd = out.grad_fn._saved_result2  # type: ignore[union-attr]
    found = normalizations.eps_of(x, rstd)
    var = x.double().var(1, correction=0, keepdim=True)
    torch.testing.assert_close((var + found).rsqrt().float(), rstd, rtol=3e-6, atol=0)


def test_equal_features() -> None:
    """Variances of zero: what was added is all that there is."""
    out = F.layer_norm(torch.ones(3, 4), (4,), torch.ones(4, requires_grad=True), None, 1e-3)
    assert normalizations.eps_of(torch.ones(3, 4), out.grad_fn._saved_result2) == pytest.approx(1e-3, rel=1e-6)  # type: ignore[union-attr]


def test_a_sample_that_is_not_finite() -> None:
    """It is one sample's affair: what was added to variances is found from others."""
    x, (_, model) = rand(4, 3), of_layer((4, 3))
    x[2, 0] = torch.nan
    with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
        bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), torch.arange(4) % 3).backward()
    for p in (model[0].weight, model[1].weight):
        for field in (p.grad_batch, p.diag_ggn_exact_batch):
            assert field.isnan().flatten(1).any(1).tolist() == [False, False, True, False]


def test_the_statistics_are_read(served: list[str]) -> None:
    """Of a function that hands them out: autograd serves it."""

    def function(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        out, mean, rstd = torch.native_group_norm(x, w, b, *x.shape, 2, 1e-5)
        return (mean * rstd).repeat(1, 4).view_as(x) + out

    torch.manual_seed(0)
    model = Normalises(function, (3, 4, 2), (4,)).double()
    found = bpk.verify(model, nn.CrossEntropyLoss(), rand(3, 4, 2), torch.arange(3), E.BatchGrad(), E.KFAC())
    verdicts = {(row.quantity, row.verdict.value) for row in found.rows}
    assert verdicts == {("BatchGrad", "ok"), ("KFAC", "refused")} and not served


class ReadsStatistics(nn.Module):
    """Layers are given the statistics of a group normalisation, with no function in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.of_means, self.of_images = nn.Linear(3, 8), nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, mean, _ = torch.native_group_norm(self.first(x).view(-1, 4, 2), None, None, len(x), 4, 2, 2, 1e-5)
        return self.of_means(mean) + self.of_images(out[:, 0])


def test_a_layer_reads_the_statistics() -> None:
    """Torch loses what comes to one of them alone: products are refused, where they would miss it."""
    torch.manual_seed(0)
    model, extensions = ReadsStatistics().double(), (E.DiagGGNExact(), E.DiagHessian(), E.HMP())
    found = bpk.verify(model, nn.CrossEntropyLoss(), rand(5, 3), torch.arange(5) % 3, *extensions)
    assert {row.verdict.value for row in found.rows} == {"refused"}


def test_statistics_of_the_batch_are_left_to_autograd(served: list[str]) -> None:
    torch.manual_seed(0)
    function: Function = lambda x, w, b: F.batch_norm(x, None, None, w, b, True)  # noqa: E731
    model, x, y = bpk.extend(Normalises(function, (4, 2), (2,)).double()), rand(4, 2), torch.arange(4) % 3
    with bpk.backpack(E.DiagGGNExact()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    found = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact(), raise_on_error=True)
    assert found.ok and not served
