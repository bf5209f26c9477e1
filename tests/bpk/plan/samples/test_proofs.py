"""Where samples are follows from the form of most graphs: no gradients are sent, for batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.plan.samples import checking, picked, probing, proofs
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.proofs import follow
from bpk.recording.record import Record
from tests.bpk.plan.samples.test_forms import check_rows

SIZES = [(4, 3), (4, 5), (2, 3), (5, 5), (3, 6)]
"""Samples and steps."""


@pytest.fixture
def tests_by_gradients(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The calls to which gradients are sent, to find out where samples are."""
    found: list[Record] = []

    def counted(behind: Behind, weights: Tensor) -> Iterator[tuple[Record, Tensor]]:
        for record, mat in probing.send_back(behind, weights):
            found.append(record)
            yield record, mat

    for module in (checking, picked):
        monkeypatch.setattr(module, "send_back", counted)
    return found


class Tagger(nn.Module):
    """Steps that see each other, and rows of all steps, in an order that `rows` says; steps may be in front."""

    def __init__(self, rows: Callable[[Tensor], Tensor], in_front: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.rows, self.in_front = nn.Linear(2, 4), nn.Linear(4, 3), rows, in_front

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.transpose(0, 1) if self.in_front else x)
        axis = 0 if self.in_front else 1
        return self.rows(self.last((h + h.mean(axis, keepdim=True)).tanh()))


def test_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was followed to test a hypothesis need not be followed again to prove it."""
    followed: list[Tensor] = []

    def counted(behind: Behind, n: int, rows: Tensor, *others: Any, **named: Any) -> dict[Record, Tensor] | None:
        followed.append(rows)
        return follow(behind, n, rows, *others, **named)

    for module in (checking, proofs):
        monkeypatch.setattr(module, "follow", counted)
    model, loss_fn = bpk.extend(Tagger(flat).double()), bpk.extend(nn.CrossEntropyLoss())
    for n, steps in SIZES:
        followed.clear()
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(torch.randn(n, steps, 2).double()), torch.randint(3, (n * steps,))).backward()
        assert len(followed) == 1


def flat(y: Tensor) -> Tensor:
    """One row after the other."""
    return y.flatten(0, 1)


def other_axis_first(y: Tensor) -> Tensor:
    """The same, by the second axis."""
    return y.transpose(0, 1).flatten(0, 1)


def passed(model: nn.Module, loss_fn: nn.Module, n: int, steps: int, samples_first: bool) -> None:
    """A pass, and individual gradients of the rows' samples."""
    x, y = torch.randn(n, steps, 2).double(), torch.randint(3, (n * steps,))
    with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
        loss_fn(model(x), y).backward()
    owner = torch.arange(n * steps)
    owner = owner // steps if samples_first else owner % n
    params = list(model.parameters())
    with bpk.disable():
        rows = nn.functional.cross_entropy(model(x), y, reduction="none") / len(y)
    for k in range(n):
        mine = torch.autograd.grad(rows[owner == k].sum(), params, retain_graph=True)
        for p, g in zip(params, mine, strict=True):
            torch.testing.assert_close(p.grad_batch[k], g)
            assert p.diag_ggn_exact_batch.shape == (n, *p.shape)


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("rows", [flat, other_axis_first])
def test_sentences_of_any_length(
    rows: Callable[[Tensor], Tensor], in_front: bool, tests_by_gradients: list[Record]
) -> None:
    """What is wrong is seen at the last layer."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Tagger(rows, in_front).double()), bpk.extend(nn.CrossEntropyLoss())
    for n, steps in SIZES:
        passed(model, loss_fn, n, steps, samples_first=(rows is flat) is not in_front)
        if n == steps:  # then several axes may be that of samples
            tests_by_gradients.clear()
    assert all(record.module is model.last for record in tests_by_gradients)


def test_predictions_of_samples(tests_by_gradients: list[Record]) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Tagger(lambda y: y.mean(1)).double()), bpk.extend(nn.CrossEntropyLoss())
    for n, steps in SIZES:
        check_rows(model, loss_fn, torch.randn(n, steps, 2).double(), torch.randint(3, (n,)))
    assert not tests_by_gradients


class Positions(nn.Module):
    """Words with an embedding of their positions, given as `[T]` or `[1, T]`, and steps that see each other."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).reshape(*[1] * (self.axes - 1), -1)
        h = self.words(x) + self.places(places)
        return self.last((h.tanh() + h.mean(1, keepdim=True)).mean(1))


@pytest.mark.parametrize("axes", [1, 2])
def test_tables_of_positions(axes: int, tests_by_gradients: list[Record]) -> None:
    """All samples read them: they are left to autograd, which needs no test either."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Positions(axes).double()), bpk.extend(nn.CrossEntropyLoss())
    for n, steps in SIZES:
        check_rows(model, loss_fn, torch.randint(9, (n, steps)), torch.randint(3, (n,)))
    assert not tests_by_gradients


class Picked(nn.Module):
    """Words of which some are picked: predictions, or (`inside`) the features that the last layer sees."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.words, self.tanh, self.last, self.inside = nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3), inside

    def forward(self, x: Tensor, *index: Tensor) -> Tensor:
        h = self.words(x)
        h = self.tanh(h + h.mean(1, keepdim=True))
        return self.last(h[index]) if self.inside else self.last(h)[index]


@pytest.mark.parametrize("same_form", [False, True], ids=["other forms", "the same form"])
@pytest.mark.parametrize("inside", [False, True], ids=["predictions", "features"])
def test_rows_that_were_picked(tests_by_gradients: list[Record], inside: bool, same_form: bool) -> None:
    """Where masks and indices point to is no part of the form: they are followed as they are now, in each pass."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Picked(inside).double()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(6):
        x, mask = torch.randint(9, (4, 5)), torch.rand(4, 5) < 0.5
        mask[:, 0] = True
        owners, steps = mask.nonzero().T
        if same_form:
            owners, steps = torch.ones(4, 5).nonzero()[torch.randperm(20)[:11]].T
        index = (owners, steps) if same_form else (mask,)
        y = torch.randint(3, (len(owners),))
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x, *index), y).backward()
        with bpk.disable():
            terms = nn.functional.cross_entropy(model(x, *index), y, reduction="none") / len(y)
            rows = [
                torch.autograd.grad(terms[owners == n].sum(), [*model.parameters()], retain_graph=True)
                for n in range(4)
            ]
        for p, expected in zip(model.parameters(), zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(p.grad_batch, torch.stack(expected))
    assert not tests_by_gradients


class Buffered(nn.Module):
    """A cell whose states are written into a tensor that was there before, at other places in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        h, states = x.new_zeros(len(x), 4), x.new_zeros(*x.shape[:2], 4)
        for step in range(x.shape[1]):
            h = self.cell(torch.cat([x[:, step], h], 1)).tanh()
            states[:, order[step]] = h
        return self.last(states).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_that_are_assigned(tests_by_gradients: list[Record], dtype: torch.dtype) -> None:
    """What is written in place is asked where it comes from, in each pass, also in single precision."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Buffered().to(dtype)), bpk.extend(nn.CrossEntropyLoss())
    for n, steps in SIZES:
        x, y, order = (
            torch.randn(n, steps, 2, dtype=dtype),
            torch.randint(3, (n, steps)),
            torch.randperm(steps).tolist(),
        )
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x, order), y).backward()
        with bpk.disable():
            terms = nn.functional.cross_entropy(model(x, order), y, reduction="none").mean(1) / n
            rows = [torch.autograd.grad(term, [*model.parameters()], retain_graph=True) for term in terms]
        for p, expected in zip(model.parameters(), zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(p.grad_batch, torch.stack(expected))
    assert not tests_by_gradients


def test_samples_that_mix_in_large_batches() -> None:
    """It is refused in the pass in which it begins, and right again afterwards."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last((h - h.mean(0 if len(x) > 3 else 1, keepdim=True)).tanh().mean(1))

    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Centred().double()), bpk.extend(nn.CrossEntropyLoss())
    for n in (2, 3, 5, 3, 2, 4):
        x, y = torch.randn(n, 6, 2).double(), torch.randint(3, (n,))
        if n > 3:
            with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchDiagGGNExact()):
                loss_fn(model(x), y).backward()
        else:
            check_rows(model, loss_fn, x, y)


def test_samples_of_a_very_large_batch_stay_apart() -> None:
    """Each has a weight by which its rows are known: random ones of so many would be equal, or nearly so."""

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).exp().flip(0))

    torch.manual_seed(0)
    model, x, y = bpk.extend(Reversed()).double(), torch.randn(50_000, 1).double(), torch.randn(50_000, 1).double()
    with bpk.backpack(E.BatchGrad()):
        bpk.extend(nn.MSELoss(reduction="sum"))(model(x), y).backward()
    expected = model.last.bias.grad_batch * model.last.weight[0] * model.first(x).exp().flip(0)
    torch.testing.assert_close(model.first.bias.grad_batch, expected.detach())
