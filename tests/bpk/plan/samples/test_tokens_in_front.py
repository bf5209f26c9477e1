"""Functions in front of all layers: tokens that are merged into rows, samples that are looked at one by one."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

SAMPLES = 4
BY_SAMPLE = (E.BatchGrad(), E.BatchL2Grad(), E.BatchDiagGGNExact(), E.BatchDiagHessian())


def compare(model: nn.Module, x: Any, y: Tensor, own: Callable[[int], tuple[Any, Tensor]], n: int) -> None:
    """What belongs to one sample each, against passes of one sample (`own(n)`), and sums of it."""
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))

    def called(x: Any) -> Tensor:
        out: Tensor = model(*x) if isinstance(x, tuple) else model(x)
        return out

    for _ in range(2):
        with bpk.backpack(*BY_SAMPLE, E.DiagGGNExact(), E.DiagHessian()):
            loss_fn(called(x), y).backward()
    for p in model.parameters():
        rows = torch.stack(
            [
                torch.autograd.grad(nn.functional.cross_entropy(called(a), b, reduction="sum"), p)[0]
                for a, b in map(own, range(n))
            ]
        )
        torch.testing.assert_close(p.grad_batch, rows)
        torch.testing.assert_close(p.batch_l2, rows.flatten(1).square().sum(1))
        for whole, each in ((p.diag_ggn_exact, p.diag_ggn_exact_batch), (p.diag_h, p.diag_h_batch)):
            assert each.shape == (n, *p.shape)
            torch.testing.assert_close(each.sum(0), whole)
    if isinstance(x, Tensor):
        assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.DiagHessian())


class Tokens(nn.Module):
    """Every token by itself, `[N, T, D] -> [N T, C]`."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(width, 4), nn.Linear(4, 3), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x.view(-1, x.shape[-1]))))


class Attending(nn.Module):
    """Tokens that see those of the same sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 6), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, steps, width = x.shape
        q, k, v = self.first(x.reshape(n * steps, width)).view(n, steps, 6).chunk(3, -1)
        return self.last((torch.softmax(q @ k.transpose(1, 2), -1) @ v).reshape(n * steps, 2))


KINDS = {
    "functions": lambda width: Tokens(width, torch.tanh),
    "modules": lambda width: Tokens(width, nn.Tanh()),
    "attention": Attending,
}


@pytest.mark.parametrize("converted", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 2, 3), (2, 2, 2)], ids=str)
def test_tokens_are_no_samples(shape: tuple[int, int, int], kind: str, converted: bool) -> None:
    """Also where another axis of the data is as long as that of samples, or rows as all that is behind it."""
    torch.manual_seed(0)
    model = bpk.extend(KINDS[kind](shape[2]).double(), use_converter=converted)
    sizes = [shape[:2], (shape[0] + 1, shape[1])]  # a batch of another size comes next
    for n, steps in sizes[: 1 if converted else 2]:
        x, y = torch.randn(n, steps, shape[2]).double(), torch.arange(n * steps) % 3
        compare(model, x, y, lambda k, x=x, y=y, s=steps: (x[k : k + 1], y[k * s : (k + 1) * s]), n)


class RowByRow(nn.Module):
    """Layers that see one sample without a batch axis."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for row in x:
            for layer in self.layers:
                row = layer(row).tanh()
            found.append(row)
        return torch.stack(found)


@pytest.mark.parametrize("widths", [(3, 4, 3), (3, 3, 3), (4, 3)], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["linear", "with LayerNorm"])
def test_layers_that_see_a_sample_without_its_axis(widths: Sequence[int], norm: bool) -> None:
    """They are left to autograd, of which there is a row for each sample."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, behind in itertools.pairwise(widths):
        layers += [nn.Linear(before, behind), *([nn.LayerNorm(behind)] if norm else [])]
    model, x, y = (
        bpk.extend(RowByRow(*layers).double()),
        torch.randn(SAMPLES, widths[0]).double(),
        torch.arange(SAMPLES) % 3,
    )
    compare(model, x, y, lambda k: (x[k : k + 1], y[k : k + 1]), len(x))


class Readout(nn.Module):
    """Sets of several sizes, each with a readout `[D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, sets: Sequence[Tensor]) -> Tensor:
        return torch.stack([self.last(torch.tanh(self.first(x)).mean(0)) for x in sets])


def test_sets_of_several_sizes() -> None:
    torch.manual_seed(0)
    model, y = bpk.extend(Readout().double()), torch.tensor([0, 1, 2])
    sets = [torch.randn(size, 3).double() for size in (2, 3, 1)]
    compare(model, sets, y, lambda k: (sets[k : k + 1], y[k : k + 1]), 3)


class Leaves(nn.Module):
    """Words of which each is looked up by itself, by a number without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3), nn.Linear(3, 3)

    def forward(self, words: Sequence[int]) -> Tensor:
        return self.head(torch.stack([self.table(torch.tensor(word)) for word in words]))


@pytest.mark.parametrize("words", [[1, 2], [4, 0, 4, 1]], ids=str)
def test_numbers_without_axes(words: list[int]) -> None:
    torch.manual_seed(0)
    model, y = bpk.extend(Leaves().double()), torch.arange(len(words)) % 3
    compare(model, words, y, lambda k: (words[k : k + 1], y[k : k + 1]), len(words))


class Neighbours(nn.Module):
    """Sums over neighbours, given before the data, and nodes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first((edges @ x).flatten(0, 1))))
        return y


class Pairs(nn.Module):
    """Each user with several items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.last = nn.Embedding(5, 3), nn.Embedding(6, 3), nn.Linear(6, 3)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        users = self.users(user.repeat_interleave(item.shape[1]))
        y: Tensor = self.last(torch.tanh(torch.cat([users, self.items(item.flatten())], 1)))
        return y


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("kind", [Neighbours, Pairs])
def test_axes_as_long_as_there_are_tensors(kind: Callable[[], nn.Module], n: int) -> None:
    """Two nodes, or items, of each sample had counted as samples: two tensors were given, with half as many rows."""
    torch.manual_seed(0)
    graphs = torch.randn(n, 2, 2).double(), torch.randn(n, 2, 3).double()
    x = graphs if kind is Neighbours else (torch.randint(5, (n,)), torch.randint(6, (n, 2)))
    model, y = bpk.extend(kind().double()), torch.arange(2 * n) % 3
    compare(model, x, y, lambda k: (tuple(t[[k]] for t in x), y[2 * k : 2 * k + 2]), n)


def passed(model: nn.Module, x: Tensor) -> int:
    """How many samples there are said to be."""
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    out = model(x)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(out, torch.arange(len(out)) % 3).backward()
    return len(next(model.parameters()).grad_batch)


def test_a_batch_of_one_is_told() -> None:
    """Tokens of one sample look like samples: the user is told; not so where there are two, or layers keep the axis."""
    model = bpk.extend(Tokens(5, nn.Tanh()))
    with pytest.warns(UserWarning, match="given one row, and the 4 rows"):
        assert passed(model, torch.randn(1, 4, 5)) == 4
    unmerged = bpk.extend(nn.Sequential(nn.Linear(5, 3), nn.Flatten(0, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert passed(model, torch.randn(2, 4, 5)) == 2
        assert passed(unmerged, torch.randn(1, 4, 5)) == 1
        assert passed(bpk.extend(nn.Linear(5, 3)), torch.randn(1, 5)) == 1


class Episodes(nn.Module):
    """Each sample is a task: examples `[N, C, S, D]` of classes, and queries `[N, Q, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, examples: Tensor, queries: Tensor) -> Tensor:
        n, classes, shots, _ = examples.shape
        centres = self.encode(examples.flatten(0, 2)).view(n, classes, shots, -1).mean(2)
        found = self.encode(queries.flatten(0, 1)).view(n, -1, 1, 3)
        return -(found - centres[:, None]).square().sum(-1).flatten(0, 1)


@pytest.mark.parametrize("queries", [2, 3, 4])
@pytest.mark.parametrize("n", [2, 3])
def test_tasks_of_examples_and_queries(n: int, queries: int) -> None:
    """Refused before with two queries, or with as many rows as a sample has numbers; all had counted as samples."""
    torch.manual_seed(0)
    x = torch.randn(n, 3, 2, 2).double(), torch.randn(n, queries, 2).double()
    y = torch.arange(n * queries) % 3
    own = lambda k: (tuple(t[[k]] for t in x), y[k * queries : (k + 1) * queries])  # noqa: E731
    compare(bpk.extend(Episodes().double()), x, y, own, n)


class Picked(nn.Module):
    """The tokens that a mask has, of data or of what a layer returns."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.first, self.last, self.behind = nn.Linear(5, 4), nn.Linear(4, 3), behind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.first(x)[mask] if self.behind else self.first(x[mask])
        out: Tensor = self.last(torch.tanh(rows))
        return out


@pytest.mark.parametrize("lengths", [(3, 4, 2), (1, 4, 2), (1, 3, 2)], ids=str)
def test_rows_picked_of_the_data_itself_are_told(lengths: tuple[int, ...]) -> None:
    """Nothing tells which sample they are of: they had silently counted as samples, or as equally many of each."""
    mask, y = torch.arange(4) < torch.tensor(lengths)[:, None], torch.arange(sum(lengths)) % 3
    x, starts = torch.randn(3, 4, 5).double(), [0, *itertools.accumulate(lengths)]
    model, loss_fn = bpk.extend(Picked(behind=False).double()), bpk.extend(nn.CrossEntropyLoss())
    told = pytest.warns(UserWarning, match="given 3 rows, and of the .* rows of 'CrossEntropyLoss' each")
    with told, bpk.backpack(E.BatchGrad()):
        loss_fn(model(x, mask), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(
            bpk.extend(Picked(behind=True).double()),
            (x, mask),
            y,
            lambda k: ((x[[k]], mask[[k]]), y[starts[k] : starts[k + 1]]),
            3,
        )
