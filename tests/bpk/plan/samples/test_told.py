"""`backpack(..., samples=)`: the user says of which samples the rows of a loss are, and the graph has to agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.random_networks import rearranged, told

N, T, CLASSES = 3, 3, 2


@pytest.mark.parametrize("seed", range(12))
def test_programs_over_named_axes(seed: int) -> None:
    assert not told.wrong(seed), told.draw(seed)


@pytest.mark.parametrize("seed", range(40))
def test_programs_that_rearrange_rows(seed: int) -> None:
    assert not rearranged.wrong(seed)


def test_who_does_not_say_it_is_told_of_guesses_but_for_few() -> None:
    found = [rearranged.untold(seed) for seed in range(40)]
    assert found.count("wrong") <= 1  # an axis as long as the batch is in front of a copy, and no layer sees the data


def check(model: nn.Module, x: Any, y: Tensor, owners: Tensor, n: int, samples: Any) -> None:
    """Compare individual gradients and diagonals with plain autograd, in two passes, and hear nothing of guesses."""
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    for _ in range(2):
        with warnings.catch_warnings(), bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), samples=samples):
            warnings.simplefilter("error")
            loss_fn(model(x), y).backward()
        with bpk.disable():
            rows = F.cross_entropy(model(x), y, reduction="none")
        for p in model.parameters():
            terms = [rows[owners == k].sum() for k in range(n)]
            each = [torch.autograd.grad(t, p, retain_graph=True, allow_unused=True)[0] for t in terms]
            expected = torch.stack([torch.zeros_like(p) if g is None else g for g in each])
            torch.testing.assert_close(p.grad_batch, expected)
        model.zero_grad()


class Steps(nn.Module):
    """Steps of samples, in front of all layers in another order than data have them, or not."""

    def __init__(self, moved: bool) -> None:
        super().__init__()
        self.first, self.last, self.moved = nn.Linear(4, 5), nn.Linear(5, CLASSES), moved

    def forward(self, x: Tensor) -> Tensor:
        h = 1.0 * x.sin()
        rows: Tensor = (h.transpose(0, 1).contiguous() + 1 if self.moved else h).reshape(-1, 4)
        return self.last(self.first(rows).tanh())


@pytest.mark.parametrize("moved", [False, True])
def test_rows_of_as_many_steps_as_samples(moved: bool) -> None:
    torch.manual_seed(0)
    model, x, y = bpk.extend(Steps(moved).double()), torch.randn(N, T, 4).double(), torch.randint(CLASSES, (N * T,))
    owners = torch.arange(N).repeat(T) if moved else torch.arange(N).repeat_interleave(T)
    check(model, x, y, owners, N, owners)
    with (
        pytest.raises(UnsupportedLayer, match=r"samples=3\) does not say which rows of"),
        bpk.backpack(E.BatchGrad(), samples=N),
    ):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert not hasattr(model.first.weight, "grad_batch")
    check(model, x, y, torch.arange(N * T), N * T, N * T)  # each row may be a sample of its own
    check(model, x, y, torch.zeros(N * T), 1, 1)


class Recurrent(nn.Module):
    """A cell whose state is cut off at each step (truncated at once), and a head on the states of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(len(x), 5).to(x), []
        for step in x.unbind(1):
            h = self.cell(step, h.detach())
            states.append(h)
        out: Tensor = self.head(torch.cat(states))
        return out


def test_steps_without_gradients_between_them() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(N, 4, 4).double(), torch.randint(CLASSES, (4 * N,))
    owners = torch.arange(N).repeat(4)
    check(bpk.extend(Recurrent().double()), x, y, owners, N, owners)


class Sentences(nn.Module):
    """Sentences as lists of words, of which tensors are made one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(6, 3), nn.LSTM(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        rows = [self.lstm(self.words(torch.tensor([words])))[0][:, -1] for words in sentences]
        out: Tensor = self.head(torch.cat(rows))
        return out


def test_lists_of_words() -> None:
    torch.manual_seed(0)
    sentences = [[1, 2, 3], [4, 5], [1, 3, 5, 0], [2]]
    check(bpk.extend(Sentences().double()), sentences, torch.randint(CLASSES, (4,)), torch.arange(4), 4, 4)


class Picked(nn.Module):
    """Rows of data that a mask picks in front of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CLASSES))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = given
        out: Tensor = self.layers(x[mask])
        return out


def test_rows_picked_in_front_of_all_layers_and_a_sample_without_any() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    x, owners = torch.randn(4, 3, 4).double(), mask.nonzero()[:, 0]
    y = torch.randint(CLASSES, (len(owners),))
    check(bpk.extend(Picked().double()), (x, mask), y, owners, 4, (4, owners))


class Stacked(nn.Module):
    """Heads in front of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return torch.stack([head(h) for head in self.heads]).flatten(0, 1)


@pytest.mark.parametrize("number", [False, True])
def test_heads_in_front(number: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(N, 4).double(), torch.randint(CLASSES, (3 * N,))
    owners = torch.arange(N).repeat(3)
    check(bpk.extend(Stacked().double()), x, y, owners, N, N if number else owners)


def test_what_is_told_and_what_is_found_do_not_mix() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Steps(True).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, T, 4).double(), torch.randint(CLASSES, (N * T,))
    by_step, by_sample = torch.arange(T).repeat_interleave(N), torch.arange(N).repeat(T)
    found = []
    for samples in (by_sample, by_step, by_sample, by_step):
        with bpk.backpack(E.BatchGrad(), samples=samples):
            loss_fn(model(x), y).backward()
        found.append(model.first.weight.grad_batch)
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])
    assert not torch.allclose(found[0], found[1])


def test_several_losses_are_of_the_same_samples() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Steps(True).double()), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(N, T, 4).double(), torch.randint(CLASSES, (2, N * T))
    owners = torch.arange(N).repeat(T)
    with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact(), samples=owners):
        (loss_fn(model(x), y[0]) + loss_fn(model(2 * x), y[1])).backward()
    sums = []
    for k, scale in enumerate((1, 2)):
        with bpk.backpack(E.BatchGrad(), samples=owners):
            loss_fn(model(scale * x), y[k]).backward()
        sums.append(model.last.weight.grad_batch)
    with bpk.backpack(E.BatchGrad(), samples=owners):
        (loss_fn(model(x), y[0]) + loss_fn(model(2 * x), y[1])).backward()
    torch.testing.assert_close(model.last.weight.grad_batch, sums[0] + sums[1])


def test_what_the_graph_contradicts_is_refused() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Stacked().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 4).double(), torch.randint(CLASSES, (3 * N,))
    with (
        pytest.raises(UnsupportedLayer, match="has other samples than the 3 of backpack"),
        bpk.backpack(E.BatchGrad(), samples=torch.arange(N).repeat_interleave(3)),
    ):
        loss_fn(model(x), y).backward()
    for samples, rows in ((4, "4 samples"), (torch.arange(4), "the samples of 4 rows")):
        with (
            pytest.raises(UnsupportedLayer, match=f"has {rows}, and .* has 9 rows"),
            bpk.backpack(E.DiagGGNExact(), samples=samples),
        ):
            loss_fn(model(x), y).backward()
    assert not hasattr(model.body.weight, "diag_ggn_exact") and not hasattr(model.body.weight, "grad_batch")


@pytest.mark.parametrize(
    "samples",
    [0, -1, 2.0, True, "3", [0, 1], torch.zeros(3), torch.tensor([0, -1]), torch.zeros(2, 2).long(),
     torch.zeros(0).long(), (2, torch.tensor([0, 2])), (2, 3),
     torch.zeros(2, dtype=torch.bool), (1.5, torch.tensor([0]))],
)  # fmt: skip
def test_what_says_nothing_of_samples(samples: Any) -> None:
    with pytest.raises(ValueError, match=r"samples=\.\.\.\) got"):
        bpk.backpack(E.BatchGrad(), samples=samples)


def test_a_batch_norm_that_mixes_samples_warns_as_without() -> None:
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES)))
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 4), torch.randint(CLASSES, (5,))
    found = []
    for samples in (None, 5):
        with bpk.backpack(E.BatchGrad(), samples=samples):
            loss_fn(model(x), y).backward()
        found.append(model[0].weight.grad_batch)
    torch.testing.assert_close(found[0], found[1])


Data = torch.utils.data.TensorDataset


@pytest.mark.parametrize("options", [{}, {"samples": lambda batch: torch.arange(len(batch[0])).repeat(T)}])
def test_a_data_set(options: dict[str, Callable[[Any], Tensor]]) -> None:
    torch.manual_seed(0)
    model, x, y = Steps(True).double(), torch.randn(9, T, 4).double(), torch.randint(CLASSES, (9, T))

    def step(model: nn.Module, loss_fn: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        loss: Tensor = loss_fn(model(batch[0]), batch[1].T.flatten())
        return loss

    def run() -> Any:
        loader = torch.utils.data.DataLoader(Data(x, y), batch_size=3)
        return bpk.accumulate(
            model, nn.CrossEntropyLoss(), loader, E.BatchGrad(), step=step, per_sample=True, progress=False, **options
        )

    if not options:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert run().samples in (9, 27)
        return
    result = run()
    assert result.samples == 9
    for k, row in enumerate(result["first.weight"]["grad_batch"]):
        loss = F.cross_entropy(model(x[k : k + 1]), y[k], reduction="sum") / 27
        torch.testing.assert_close(row, torch.autograd.grad(loss, model.first.weight)[0])


def test_verify_passes_it_on() -> None:
    torch.manual_seed(0)
    model, x, y = Steps(True), torch.randn(N, T, 4), torch.randint(CLASSES, (N * T,))
    quantities = E.BatchGrad(), E.BatchDiagGGNExact(), E.KFAC(), E.BatchDiagHessian()
    told = {"samples": torch.arange(N).repeat(T)}
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, options=told)
    with pytest.raises(ValueError, match=r"got 1\.5"):
        bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, options={"samples": 1.5})
    with pytest.raises(TypeError, match="extension_hook"):
        bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, options={"extension_hook": print})


def test_a_data_set_refuses_what_is_no_function() -> None:
    loader = torch.utils.data.DataLoader(Data(torch.randn(4, 4), torch.arange(4) % 2))
    with pytest.raises(TypeError, match="samples=3"):
        bpk.accumulate(nn.Linear(4, 2), nn.CrossEntropyLoss(), loader, samples=3)  # type: ignore[arg-type]
