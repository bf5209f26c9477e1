"""`F.linear` with a bias that functions put together from parameters: all quantities, and factors of the weight."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.arrangement import AXES, Arrangement
from bpk.jacobians.families.rearranged import PartsOfBias
from bpk.plan.samples import attribution
from bpk.recording.graph import parameter_products
from tests.references.compare import check, rand
from tests.references.reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WIDTH = 4


class Attention(nn.Module):
    """Queries and values have a bias, keys have none (BEiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("k_bias", torch.zeros(WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        q, k, v = F.linear(self.first(x), self.qkv.weight, bias).chunk(3, -1)
        found: Tensor = self.last((q @ k.mT).softmax(-1) @ v).mean(1)
        return found


class Layer(nn.Module):
    """A product with a weight `[6, 4]`, plus a function of two parameters."""

    def __init__(
        self, bias: Callable[[Tensor, Tensor], Tensor], shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.randn(6, WIDTH))
        self.one, self.other = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(F.linear(self.first(x), self.weight, self.bias(self.one, self.other))))
        return found


PARTS = {
    "one after the other": (lambda a, b: torch.cat([a, b]), ((2,), (4,))),
    "a matrix, turned": (lambda a, b: a.T.flatten() + F.pad(b, (2, 2)), ((2, 3), (2,))),
    "added to each other": (lambda a, b: a + b.flip(0), ((6,), (6,))),
}
OTHERS = {
    "a part of a parameter": (lambda a, b: torch.cat([a[:2], b]), ((3,), (4,))),
    "twice the same": (lambda a, b: torch.cat([a, a, b]), ((2,), (2,))),
    "scaled": (lambda a, b: torch.cat([2 * a, b]), ((2,), (4,))),
    "curved": (lambda a, b: torch.cat([a.exp(), b]), ((2,), (4,))),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The rules of computed biases that were made use of."""
    found: list[object] = []
    make = parameter_products.with_parts

    def spy(*given: object) -> object:
        found.append(make(*given))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(parameter_products, "with_parts", spy)
    return found


def test_attention(served: list[object]) -> None:
    torch.manual_seed(0)
    check(Attention().double(), rand(3, 5, WIDTH), factors=False)
    assert served


@pytest.mark.parametrize("name", [*PARTS, *OTHERS])
@pytest.mark.parametrize("shape", [(3, WIDTH), (3, 2, WIDTH)])
def test_everything(name: str, shape: tuple[int, ...], served: list[object]) -> None:
    torch.manual_seed(1)
    bias, shapes = (PARTS | OTHERS)[name]
    model: nn.Module = Layer(bias, shapes).double()
    if len(shape) == 3:
        model = nn.Sequential(model, nn.Flatten(), nn.Linear(6, 3).double())
    check(model, rand(*shape), factors=False)
    assert bool(served) == (name in PARTS)


def test_zero_is_no_place_where_curved_functions_pass() -> None:
    """At `p = 0`, the slope of `exp(p)` is one; its second derivative is not zero."""
    model = Layer(lambda a, b: torch.cat([a.exp(), b]), ((2,), (4,))).double()
    with torch.no_grad():
        model.one.zero_()
    check(model, rand(3, WIDTH), factors=False)


@pytest.mark.parametrize("frozen", ["the bias itself", "what it is made of"])
def test_a_bias_without_a_gradient(frozen: str) -> None:
    """It leads nowhere in autograd's graph."""
    torch.manual_seed(4)
    whole: Callable[[Tensor, Tensor], Tensor] = lambda a, b: a  # noqa: E731
    cat: Callable[[Tensor, Tensor], Tensor] = lambda a, b: torch.cat([a, b])  # noqa: E731
    itself = frozen == "the bias itself"
    model = Layer(whole, ((6,), (1,))).double() if itself else Layer(cat, ((2,), (4,))).double()
    model.one.requires_grad_(False)
    model.other.requires_grad_(False)
    x, y = rand(3, WIDTH), torch.arange(3)
    ref = Reference(model, (x,), lambda out: F.cross_entropy(out, y))
    with bpk.backpack(E.BatchGrad(), E.DiagHessian(), E.KFAC()):
        bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
            torch.testing.assert_close(p.diag_h, ref.diag_h(name))
    assert not hasattr(model.one, "grad_batch")
    assert [tuple(factor.shape) for factor in model.weight.kfac] == [(6, 6), (WIDTH, WIDTH)]  # those of a linear layer


def test_factors_are_those_of_a_linear_layer() -> None:
    """Of the weight `[G, A]`; of a part of the bias, the rows and columns of `G` that it has."""
    torch.manual_seed(2)
    model = Layer(lambda a, b: torch.cat([a, b]), ((2,), (4,))).double()
    layer = nn.Linear(WIDTH, 6).double()
    with torch.no_grad():
        layer.weight.copy_(model.weight)
        layer.bias.copy_(torch.cat([model.one, model.other]))
    like = nn.Sequential(copy.deepcopy(model.first), layer, nn.Tanh(), copy.deepcopy(model.last))
    x, y = rand(5, WIDTH), torch.arange(5) % 3
    for each in (bpk.extend(like), bpk.extend(model)):
        with bpk.backpack(E.KFLR(), E.KFRA(), E.EKFLR()):
            bpk.extend(nn.CrossEntropyLoss())(each(x), y).backward()
    found = dict(model.named_parameters())
    for field in ("kflr", "kfra"):
        torch.testing.assert_close(getattr(found["weight"], field), getattr(layer.weight, field))
        (whole,) = getattr(layer.bias, field)
        torch.testing.assert_close(getattr(found["one"], field)[0], whole[:2, :2])
        torch.testing.assert_close(getattr(found["other"], field)[0], whole[2:, 2:])


def test_the_form_of_the_graph_is_found_again(monkeypatch: pytest.MonkeyPatch, served: list[object]) -> None:
    """The second pass does not look for the samples once more."""
    model, x, y = bpk.extend(Attention()), torch.randn(3, 5, WIDTH), torch.arange(3)
    for k in range(3):
        if k:
            monkeypatch.setattr(attribution, "attribute", None)
        with bpk.backpack(E.BatchGrad()):
            bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert len(set(served)) == 1


def test_low_precision_holds_large_numbers() -> None:
    """Under autocast the bias has 8 bits."""
    width = 700
    model = nn.Sequential(Wide(width), nn.Linear(width, 3))
    x, y = torch.randn(2, 3), torch.arange(2)
    with bpk.backpack(E.BatchGrad()):
        with torch.autocast("cpu", torch.bfloat16):
            out = bpk.extend(model)(x)
        bpk.extend(nn.CrossEntropyLoss())(out.float(), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, rtol=5e-2, atol=1e-3)


class Wide(nn.Module):
    """A layer whose bias is in two parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 3))
        self.one, self.other = (nn.Parameter(torch.randn(n)) for n in (width - 300, 300))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, torch.cat([self.one, self.other]))


def test_forward_of_the_rule() -> None:
    torch.manual_seed(3)
    arrangement = Arrangement((6, WIDTH), ((AXES, (1, 0)),))
    rule = PartsOfBias(arrangement, {"a": torch.tensor([0, 1]), "b": torch.tensor([[2, 3], [4, 5]])})
    x, weight, a, b = torch.randn(3, WIDTH), torch.randn(6, WIDTH), torch.randn(2), torch.randn(2, 2)
    expected = F.linear(x, weight, torch.cat([a, b.flatten()]))
    torch.testing.assert_close(rule.forward(None, [x], {"weight": weight, "a": a, "b": b}), expected)
