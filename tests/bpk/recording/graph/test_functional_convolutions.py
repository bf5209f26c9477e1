"""`F.conv1d(x, self.weight, self.bias)` and its kind: all quantities, and factors, are those of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.recording.graph import convolutions
from tests.references.compare import check, rand

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Convolves(nn.Module):
    """A function of `[N, 2, ...]`, a weight and a bias; `first`: behind a layer."""

    def __init__(
        self, function: Function, weight: tuple[int, ...], bias: int | None, shape: tuple[int, ...], first: bool = True
    ) -> None:
        super().__init__()
        self.function = function
        self.first: nn.Module = nn.PReLU(init=0.5) if first else nn.Identity()
        self.weight = nn.Parameter(torch.randn(weight))
        self.bias = None if bias is None else nn.Parameter(torch.randn(bias))
        with torch.no_grad():
            width = function(torch.zeros(shape), self.weight, self.bias)[0].numel()
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.function(self.first(x), self.weight, self.bias)).flatten(1))
        return found


CASES: dict[str, tuple[Function, tuple[int, ...], int | None, tuple[int, ...]]] = {
    "strided": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (3, 2, 3), 3, (3, 2, 7)),
    "same": (lambda x, w, b: F.conv1d(x, w, b, padding="same", dilation=2), (3, 2, 3), None, (3, 2, 5)),
    "depthwise": (lambda x, w, b: F.conv1d(x, w.unsqueeze(1), b, groups=2), (2, 3), 2, (3, 2, 5)),
    "there and back": (lambda x, w, b: F.conv1d(x, w.squeeze(1).unsqueeze(1), b, groups=2), (2, 1, 3), 2, (3, 2, 5)),
    "images": (lambda x, w, b: F.conv2d(x, w, b, padding=(1, 0)), (2, 2, 2, 1), 2, (3, 2, 3, 3)),
    "one number for all axes": (lambda x, w, b: F.conv2d(x, w, b, (2,), (1,), (1,)), (2, 2, 2, 1), 2, (3, 2, 3, 3)),
    "volumes": (lambda x, w, b: F.conv3d(x, w, b), (2, 2, 2, 1, 2), 2, (2, 2, 2, 2, 2)),
    "transposed": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, padding=1, output_padding=1),
        (2, 3, 3),
        3,
        (3, 2, 4),
    ),
    "axes exchanged": (lambda x, w, b: F.conv1d(x, w.transpose(0, 1), b), (2, 3, 3), 3, (3, 2, 5)),
    "scaled": (lambda x, w, b: F.conv1d(x, 2 * w, b), (3, 2, 3), 3, (3, 2, 5)),
    "twice": (lambda x, w, b: F.conv1d(F.conv1d(x, w, b).sin(), w, b), (2, 2, 2), 2, (3, 2, 5)),
}
GENERIC = ("depthwise", "axes exchanged")
"""The weight is not the parameter as it is: autograd carries columns through."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What stood for the convolutions that were found."""
    found: list[nn.Module] = []
    make = convolutions.convolution_layer

    def spy(*options: Any) -> nn.Module:
        found.append(make(*options))
        return found[-1]

    monkeypatch.setattr(convolutions, "convolution_layer", spy)
    return found


@pytest.mark.parametrize("first", [False, True], ids=["of data", "behind a layer"])
@pytest.mark.parametrize("name", CASES)
def test_everything(name: str, first: bool, served: list[nn.Module]) -> None:
    torch.manual_seed(0)
    function, weight, bias, shape = CASES[name]
    check(Convolves(function, weight, bias, shape, first).double(), rand(*shape), factors=False)
    assert bool(served) == (name not in GENERIC)


def test_factors_are_those_of_a_layer() -> None:
    torch.manual_seed(1)
    function: Function = lambda x, w, b: F.conv1d(x, w, b, stride=2)  # noqa: E731
    model = Convolves(function, (3, 2, 3), 3, (5, 2, 7)).double()
    layer = nn.Conv1d(2, 3, 3, stride=2).double()
    layer.load_state_dict({"weight": model.weight, "bias": model.bias})
    last, first = nn.Linear(9, 3).double(), nn.PReLU(init=0.5).double()
    last.load_state_dict(model.last.state_dict())
    like = nn.Sequential(first, layer, nn.Tanh(), nn.Flatten(), last)
    x, y = rand(5, 2, 7), torch.arange(5) % 3
    for each in (model, like):
        with bpk.backpack(E.KFLR(), E.KFRA(), E.EKFLR()):
            bpk.extend(nn.CrossEntropyLoss())(bpk.extend(each)(x), y).backward()
    for name in ("weight", "bias"):
        for field in ("kflr", "kfra"):
            torch.testing.assert_close(getattr(getattr(model, name), field), getattr(getattr(layer, name), field))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters(frozen: str) -> None:
    torch.manual_seed(2)
    function, weight, bias, shape = CASES["strided"]
    model = Convolves(function, weight, bias, shape).double()
    getattr(model, frozen).requires_grad_(False)
    x, y = rand(*shape), torch.arange(3)
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad(), E.BatchDiagHessian(), E.DiagHessian()):
        bpk.extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    for p in model.parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
            torch.testing.assert_close(p.diag_h_batch.sum(0), p.diag_h)
    assert not hasattr(getattr(model, frozen), "grad_batch")


def test_samples_one_by_one() -> None:
    """Without a batch axis torch adds one: its only row is no sample of the batch."""

    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2, 3))
            self.last = nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(torch.stack([F.conv1d(one, self.weight).tanh() for one in x]).flatten(1))
            return found

    torch.manual_seed(3)
    model, x, y = OneByOne().double(), rand(4, 2, 5), torch.arange(4) % 3
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    for n in range(4):
        loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / 4
        torch.testing.assert_close(model.weight.grad_batch[n], torch.autograd.grad(loss, model.weight)[0])


def test_autocast() -> None:
    torch.manual_seed(4)
    function, weight, bias, shape = CASES["strided"]
    model, x, y = bpk.extend(Convolves(function, weight, bias, shape)), torch.randn(shape), torch.arange(3)
    with bpk.backpack(E.BatchGrad(), E.SumGradSquared()):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        bpk.extend(nn.CrossEntropyLoss())(out.float(), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, rtol=5e-2, atol=1e-2)
        torch.testing.assert_close(p.grad_batch.square().sum(0), p.sum_grad_squared, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["strided", "linear"])
def test_inside_of_a_checkpoint(name: str) -> None:
    """What the node has saved is given out once in a pass, and computed again where it is read for second order."""
    torch.manual_seed(5)
    cases: dict[str, tuple[Function, tuple[int, ...], int | None, tuple[int, ...]]] = {
        "linear": (F.linear, (3, 4), 3, (3, 2, 4))
    }
    function, weight, bias, shape = (CASES | cases)[name]

    def again(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        found: Tensor = checkpoint(function, x, w, b, use_reentrant=False)
        return found

    plain, x, y = Convolves(function, weight, bias, shape).double(), rand(*shape), torch.arange(3)
    other = Convolves(again, weight, bias, shape).double()
    other.load_state_dict(plain.state_dict())
    for model in (plain, other):
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
            bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y).backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        for field in ("grad_batch", "diag_ggn_exact", "diag_h"):
            torch.testing.assert_close(getattr(p, field), getattr(q, field))
