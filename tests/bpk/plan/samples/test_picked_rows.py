"""Losses on rows that were picked, as `logits[mask]`: padding left out, masked language models, labelled pixels."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

C = 5


class Tagger(nn.Module):
    """A class for each step, by a recurrent layer that has time first or second."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(6, C)
        self.layer = nn.LSTM(4, 3, batch_first=batch_first, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        if self.layer.batch_first:
            return self.head(self.layer(h)[0])
        return self.head(self.layer(h.transpose(0, 1))[0].transpose(0, 1))


class Masked(nn.Module):
    """A masked language model, whose head sees the masked positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, C)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens))[mask])


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x)))).permute(0, 2, 3, 1)


class Pairs(nn.Module):
    """Eight numbers in all, of which the last ones feed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(2, C)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.body(x).unflatten(1, (2, 2))[mask])


Case = tuple[nn.Module, Callable[[], Tensor], Tensor]


def tagger(batch_first: bool, n: int, steps: int) -> Case:
    lengths = torch.randint(1, steps + 1, (n,))
    mask, tokens, model = torch.arange(steps) < lengths[:, None], torch.randint(9, (n, steps)), Tagger(batch_first)
    return model, lambda: model(tokens)[mask], mask


def pixels_by_index(owners: list[int]) -> Case:
    """In any order, and maybe none of some images."""
    x, places, model = torch.randn(3, 2, 4, 4).double(), torch.randperm(16)[: len(owners)], Pixels()
    model.norm = nn.Identity()
    return model, lambda: model(x)[owners, places // 4, places % 4], torch.tensor(owners)


def masked(counts: list[int]) -> Case:
    mask, tokens, model = torch.zeros(len(counts), 4, dtype=torch.bool), torch.randint(9, (len(counts), 4)), Masked()
    for row, count in zip(mask, counts, strict=True):
        row[torch.randperm(4)[:count]] = True
    return model, lambda: model(tokens, mask), mask


class Unmixed(nn.Module):
    """Words, with parameters for their places, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(9, 4), nn.Parameter(torch.randn(4, 4))
        self.layers = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, C))

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.layers(self.table(tokens) + self.places)
        return h


def unmixed() -> Case:
    """Nine rows of three samples: the first three are not those of the first one."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    tokens, model = torch.randint(9, (3, 4)), Unmixed()
    return model, lambda: model(tokens)[mask], mask


class MixedBefore(nn.Module):
    """Steps see each other, by functions, right before some are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, C)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.table(tokens)
        return self.head((h + h.mean(1, keepdim=True)).tanh()[mask])


def mixed_before() -> Case:
    tokens, mask, model = torch.randint(9, (4, 5)), torch.rand(4, 5) < 0.5, MixedBefore()
    mask[:, 0] = True
    return model, lambda: model(tokens, mask), mask


def drawn_with_replacement() -> Case:
    """Some pixels are in several rows."""
    owners, places = torch.tensor([0, 0, 2, 1, 1, 2, 2]), torch.tensor([3, 3, 5, 0, 0, 0, 5])
    x, model = torch.randn(3, 2, 4, 4).double(), Pixels()
    model.norm = nn.Identity()
    return model, lambda: model(x)[owners, places // 4, places % 4], owners


def pairs() -> Case:
    x, mask, model = torch.randn(2, 3).double(), torch.tensor([[True, True], [True, False]]), Pairs()
    return model, lambda: model(x, mask), mask


def pixels() -> Case:
    x, mask, model = torch.randn(3, 2, 4, 4).double(), torch.rand(3, 4, 4) < 0.5, Pixels()
    return model, lambda: model(x)[mask], mask


CASES: dict[str, Callable[[], Case]] = {
    "padding": lambda: tagger(True, 4, 5),
    "padding, time first": lambda: tagger(False, 4, 5),
    "more steps than samples": lambda: tagger(True, 3, 7),
    "masked": lambda: masked([2, 1, 3]),
    "as many as samples": lambda: masked([2, 0, 1, 1]),
    "a multiple of the samples": lambda: masked([3, 2, 1]),
    "a multiple, each by itself": unmixed,
    "the same for each": lambda: masked([2, 2, 2]),
    "of eight numbers": pairs,
    "pixels": pixels,
    "in any order": lambda: pixels_by_index([2, 0, 1, 0, 2]),
    "as many as two for each": lambda: pixels_by_index([0, 0, 2, 2, 2, 1]),
    "not of every image": lambda: pixels_by_index([2, 0, 2, 2, 0]),
    "drawn with replacement": drawn_with_replacement,
    "mixed before": mixed_before,
    "of one image": lambda: pixels_by_index([1, 1, 1, 1, 1]),
}


def gradients(value: Tensor, params: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]


def compare(model: nn.Module, predict: Callable[[], Tensor], picks: Tensor) -> None:
    """Of every sample the gradient, and the GGN's diagonal, by plain autograd; `picks`: a mask, or whose rows."""
    n, owners = (len(picks), picks.nonzero()[:, 0]) if picks.dtype is torch.bool else (3, picks)
    y, params = torch.randint(C, (len(owners),)), list(model.parameters())
    with bpk.disable():
        out = predict()
        terms = nn.functional.cross_entropy(out, y, reduction="none") / len(y)
        rows = [gradients((terms * (owners == k)).sum(), params) for k in range(n)]
        diagonals = [torch.zeros(n, *p.shape).double() for p in params]
        for row, p, k in zip(out, out.softmax(1).detach(), owners, strict=True):
            values, vectors = torch.linalg.eigh((p.diag() - p.outer(p)) / len(y))
            for column in (vectors * values.clamp(min=0).sqrt()).T:
                for total, g in zip(diagonals, gradients(row @ column, params), strict=True):
                    total[k] += g.square()
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.BatchDiagGGNExact()):
        loss_fn(predict(), y).backward()
    for k, p in enumerate(params):
        each = torch.stack([row[k] for row in rows])
        torch.testing.assert_close(p.grad_batch, each)
        torch.testing.assert_close(p.variance, each.var(0, correction=0))
        torch.testing.assert_close(p.diag_ggn_exact_batch, diagonals[k])
        torch.testing.assert_close(p.diag_ggn_exact, diagonals[k].sum(0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_the_data(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        model, predict, mask = CASES[name]()
        bpk.extend(model)
        compare(model, predict, mask)
    finally:
        torch.set_default_dtype(torch.float32)


def test_masks_change_from_step_to_step() -> None:
    torch.manual_seed(0)
    model, mask = bpk.extend(Tagger(True).double()), torch.zeros(0)
    for step in range(8):
        tokens, mask = torch.randint(9, (4, 5)), mask if step % 3 == 2 else torch.rand(4, 5) < 0.6
        compare(model, lambda tokens=tokens, mask=mask: model(tokens)[mask], mask)


def test_every_quantity_is_verified() -> None:
    torch.manual_seed(0)
    model, tokens, mask = Masked(), torch.randint(9, (4, 5)), torch.rand(4, 5) < 0.5
    found = bpk.verify(model, nn.CrossEntropyLoss(), (tokens, mask), torch.randint(C, (int(mask.sum()),)))
    assert found
    assert {"BatchGrad", "DiagGGNExact", "KFLR", "HMP"} <= {row.quantity for row in found.rows if row.entries}


@pytest.mark.parametrize("quantity", [E.BatchGrad(), E.BatchDiagGGNExact()], ids=["first order", "second order"])
def test_differences_of_samples_mix(quantity: E.BackpropExtension) -> None:
    """Rows of the loss that are made of two samples each belong to none."""
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))), bpk.extend(nn.MSELoss())
    x = torch.randn(6, 3)
    with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(quantity):
        out = model(x)
        loss_fn(out[1:] - out[:-1], torch.zeros(5, 5)).backward()


class StepsInFront(nn.Module):
    """Features of each step, with those of its place."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.places, self.head = nn.Linear(3, 4), nn.Embedding(4, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.read(x.transpose(0, 1).contiguous())).mean(2)
        return self.head(torch.tanh(h + self.places(torch.arange(4))[:, None]))


def test_as_many_rows_of_both_halves_of_the_steps_are_no_two_samples() -> None:
    """Which the graph alone would agree with."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(StepsInFront().double()), bpk.extend(nn.CrossEntropyLoss())
    x, mask = torch.randn(3, 4, 2, 3).double(), torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0]]).bool()
    y, owners = torch.randint(C, (6,)), torch.arange(3)[:, None].expand(3, 4).t()[mask.t()]
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x)[mask.t()], y).backward()
    params = list(model.parameters())
    for n in range(3):
        loss = nn.functional.cross_entropy(model(x)[mask.t()], y, reduction="none")[owners == n].sum() / 6
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            assert p.grad_batch.shape == (3, *p.shape)
            torch.testing.assert_close(p.grad_batch[n], g)


def factors_of_picks(picks: list[list[int]]) -> list[Tensor]:
    """The factors of a linear layer's samples behind a loss on these rows, after one pass for each list of them."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(3, 2).double()), bpk.extend(nn.CrossEntropyLoss())
    x = torch.randn(6, 3, dtype=torch.float64)
    for rows in picks:
        with bpk.backpack(E.BatchKFLR()):
            loss_fn(model(x)[torch.tensor(rows)], torch.zeros(len(rows), dtype=torch.long)).backward()
    return bpk.fields_of(model.weight).kflr_batch


def test_what_was_picked_before_counts_no_more() -> None:
    """Rows that a mask has picked in an earlier pass had kept the sample that they were of."""
    for factor, expected in zip(factors_of_picks([[0, 2, 4], [1, 2, 3]]), factors_of_picks([[1, 2, 3]]), strict=True):
        torch.testing.assert_close(factor, expected)


@pytest.mark.parametrize("halves", [([0, 1], [2, 3]), ([0, 3], [2, 1])], ids=["in order", "picked"])
def test_losses_of_different_rows_are_told(halves: tuple[list[int], list[int]]) -> None:
    """Two views of two samples, or four samples: nothing tells which. Steps, and the same rows, are of one sample."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(3, C)), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3), torch.arange(4)
    first, second = (torch.tensor(rows) for rows in halves)
    for number in range(2):
        with warnings.catch_warnings(record=True) as found, bpk.backpack(E.BatchGrad()):
            warnings.simplefilter("always")
            out = model(x)
            (loss_fn(out[first], y[first]) + loss_fn(out[second], y[second])).backward()
        told = [str(w.message) for w in found if "sees other rows than a loss before, of the 4" in str(w.message)]
        assert len(told) == 1 - number
        assert len(model.weight.grad_batch) == 2
    merged = bpk.extend(nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, C)))
    with warnings.catch_warnings(), bpk.backpack(E.BatchGrad()):
        warnings.simplefilter("error")
        steps = merged(torch.randn(4, 2, 3)).unflatten(0, (4, 2))
        (loss_fn(steps[:, 0], y) + bpk.extend(nn.CrossEntropyLoss())(steps[:, 1], y)).backward()
        out = model(x)
        (loss_fn(out, y) + bpk.extend(nn.CrossEntropyLoss())(out, y)).backward()
