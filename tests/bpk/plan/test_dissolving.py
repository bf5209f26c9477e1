"""Layers without parameters between curved functions (a softmax between two products) are part of one stretch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.plan import dissolving
from bpk.plan.dissolving import is_curved
from bpk.plan.graph import Source
from tests.helpers import columns_begun, extended
from tests.references.hessian_diagonals import of_samples


class Heads(nn.Module):
    """Attention in two heads, whose layers in between are given."""

    def __init__(self, *between: Callable[[Tensor], Tensor], joint: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 12) if joint else nn.ModuleList([nn.Linear(3, 4) for _ in range(3)])
        self.joint, self.last = joint, nn.Linear(4, 3)
        self.between = nn.Sequential(*between) if isinstance(between[0], nn.Module) else between[0]

    def forward(self, x: Tensor) -> Tensor:
        each = self.inner(x).chunk(3, -1) if self.joint else [layer(x) for layer in self.inner]
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in each)
        found = self.between(q @ k.mT) @ v
        return self.last(found.transpose(1, 2).flatten(2).mean(1))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The names of the layers at which columns begin."""
    return columns_begun(monkeypatch)


def values(model: nn.Module, *exts: object, positions: int = 5) -> list[Tensor]:
    """Individual diagonals, after a comparison with plain autograd."""
    torch.manual_seed(0)
    x, y = torch.randn(3, positions, 3).double(), torch.tensor([0, 2, 1])
    by_autograd = of_samples(model.double(), x, y)
    model, loss_fn = extended(model)
    with bpk.backpack(E.BatchDiagHessian(), E.DiagHessian(), *exts):
        loss_fn(model(x), y).backward()
    for p, diag in zip(model.parameters(), by_autograd, strict=True):
        torch.testing.assert_close(p.diag_h_batch, diag)
        torch.testing.assert_close(p.diag_h, diag.sum(0))
    return by_autograd


BETWEEN = {
    "softmax": (nn.Softmax(-1),),
    "dropout": (nn.Softmax(-1), nn.Dropout(0.1).eval()),
    "gelu": (nn.GELU(),),
    "two": (nn.Tanh(), nn.Softmax(-2)),
}


@pytest.mark.parametrize("layers", BETWEEN.values(), ids=BETWEEN)
def test_layers_between_products_start_no_columns(layers: tuple[nn.Module, ...], started: Counter[str]) -> None:
    torch.manual_seed(0)
    values(Heads(*layers).eval())
    assert set(started) == {"CrossEntropyLoss", "Linear"}


def test_as_many_columns_as_of_the_function(started: Counter[str]) -> None:
    for between in (nn.Softmax(-1), softmax):
        torch.manual_seed(0)
        started.clear()
        values(Heads(between))
        assert set(started) == {"CrossEntropyLoss", "Linear"}


def test_few_positions_of_wide_heads_stay_apart(started: Counter[str]) -> None:
    """What feeds the products has more entries than what is in between."""
    torch.manual_seed(0)
    values(Heads(nn.Softmax(-1), joint=False), positions=1)
    assert "Softmax" in started
    started.clear()
    values(Heads(nn.Softmax(-1), joint=False), positions=5)
    assert "Softmax" not in started


class Read(Heads):
    """What is in between is read by a layer, too."""

    def __init__(self) -> None:
        super().__init__(nn.Softmax(-1))
        self.reader = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        weights = self.between(q @ k.mT)
        found = self.last((weights @ v).transpose(1, 2).flatten(2).mean(1))
        return found + self.reader(weights).mean((1, 2))


def test_what_a_layer_reads_stays_a_call(started: Counter[str]) -> None:
    torch.manual_seed(0)
    values(Read())
    assert "Softmax" in started


def test_clipped_blocks_are_those_of_each_layer() -> None:
    """`PCHMP` leaves out the negative curvature of every call: which calls there are must not depend on others."""
    torch.manual_seed(0)
    x, y, model = torch.randn(3, 5, 3).double(), torch.tensor([0, 2, 1]), Heads(nn.Softmax(-1)).double()
    model, loss_fn = extended(model)
    products = []
    for others in ((), (E.DiagHessian(),)):
        with bpk.backpack(E.PCHMP(), *others):
            loss_fn(model(x), y).backward()
        products.append([p.pchmp(torch.ones_like(p)[None]) for p in model.parameters()])
    torch.testing.assert_close(*products)


def test_together_with_quantities_of_columns_of_the_loss(started: Counter[str]) -> None:
    torch.manual_seed(0)
    values(Heads(nn.Softmax(-1)), E.DiagGGNExact(), E.BatchGrad())
    assert "Softmax" not in started


def test_a_graph_that_is_kept_may_be_passed_again() -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(3, 5, 3).double(), torch.tensor([0, 2, 1]), Heads(nn.Softmax(-1)).double()
    model, loss_fn = extended(model)
    loss = loss_fn(model(x), y)
    found = []
    for _ in range(2):
        with bpk.backpack(E.DiagHessian(), retain_graph=True):
            loss.backward(retain_graph=True)
        found.append([p.diag_h.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)
    with bpk.backpack(E.DiagGGNExact()):
        loss.backward()
    again = [p.diag_ggn_exact for p in model.parameters()]
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(x), y).backward()
    torch.testing.assert_close(again, [p.diag_ggn_exact for p in model.parameters()])


class Stream(nn.Module):
    """Layers without parameters beside the identity, between curved functions: every sum has two ways to go on."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.inner = nn.ModuleList(nn.Tanh() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin()
        for layer in self.inner:
            h = h + layer(h)
        return self.last(h.sin())


def test_each_call_of_a_stream_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Source] = []

    def counted(source: Source) -> bool:
        asked.append(source)
        return is_curved(source)

    monkeypatch.setattr(dissolving, "is_curved", counted)
    blocks = 14
    model, loss_fn = extended(Stream(blocks))
    with bpk.backpack(E.DiagHessian()):
        loss_fn(model(torch.randn(1, 2)), torch.tensor([0])).backward()
    assert 0 < len(asked) <= (4 * blocks) ** 2
