"""How many samples there are, where layers see some of them, tables beside them, or lists: found on models in use."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.bpk.plan.samples.test_rows_of_several_samples import check


class Halves(nn.Module):
    """The first half of a batch is centred, a layer has the other: neither are half as many samples there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2)
        b = self.layer(b[:, None])[0][:, 0] if isinstance(self.layer, nn.LSTM) else self.layer(b)
        return self.last(torch.cat([a - a.mean(0), b]).tanh())


@pytest.mark.parametrize("n", [4, 6, 8])
@pytest.mark.parametrize("layer", [lambda: nn.LSTM(4, 4, batch_first=True), lambda: nn.Linear(4, 4)])
def test_layers_that_have_half_of_the_batch_do_not_halve_it(n: int, layer: Any) -> None:
    model, loss_fn = bpk.extend(Halves(layer())), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(torch.randn(n, 3)), torch.arange(n) % 3).backward()


class Prompted(nn.Module):
    """A prompt that a recurrent layer makes of a table of one row, beside the samples (P-tuning)."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4) if source == "table" else None
        self.layer, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.linspace(-1, 1, 12).to(x).view(1, 3, 4)
        rows = rows if self.table is None else self.table(torch.arange(3)[None])
        return self.last((x + self.layer(rows)[0].sum(1)).tanh())


@pytest.mark.parametrize("source", ["table", "numbers"])
@pytest.mark.parametrize("n", [5, 2])
def test_a_layer_beside_the_samples_does_not_make_them_one(source: str, n: int) -> None:
    torch.manual_seed(0)
    check(Prompted(source), torch.randn(n, 4, dtype=torch.double), torch.arange(n) % 3)


def test_a_batch_of_one_beside_as_many_samples_as_an_axis_is_long_is_told() -> None:
    model, loss_fn = bpk.extend(Prompted("table")), bpk.extend(nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="all are taken for one sample"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(torch.randn(3, 4)), torch.arange(3)).backward()


def test_steps_of_one_sample_are_no_samples() -> None:
    """The same shapes, where the layer sees what was given."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x[None])[0][0])

    model, loss_fn = bpk.extend(Steps()), bpk.extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings(), bpk.backpack(E.BatchGrad()):
        warnings.simplefilter("error")
        loss_fn(model(torch.randn(3, 4)), torch.arange(3)).backward()
    assert model.last.weight.grad_batch.shape == (1, 3, 4)


class Listed(nn.Module):
    """A model that is given a list of samples: images, bags, or sequences that it packs into one (NaViT)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.LazyLinear(6), nn.Linear(6, 3), kind

    def forward(self, samples: list[Tensor]) -> Tensor:
        if self.kind == "bags":
            return self.last(torch.stack([self.first(bag).tanh().mean(0) for bag in samples]))
        if self.kind == "images":
            return self.last(self.first(torch.stack(samples).flatten(1)).tanh())
        packed = self.first(torch.cat(samples)[None])
        of = torch.repeat_interleave(torch.tensor([len(sample) for sample in samples]))
        scores = (packed @ packed.mT).masked_fill(of[:, None] != of[None], float("-inf"))
        mixed = (packed + scores.softmax(-1) @ packed).tanh()[0]
        return self.last(torch.zeros(len(samples), 6).to(mixed).index_add(0, of, mixed))


@pytest.mark.parametrize("kind", ["images", "bags", "packed"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_list_of_samples(kind: str, rows: int, n: int) -> None:
    """The first of them has so many rows, others of a bag have more."""
    torch.manual_seed(0)
    made, loss_fn = Listed(kind).double(), bpk.extend(nn.CrossEntropyLoss())
    sizes = [(rows + k % 3 * (kind != "images"), 4) for k in range(n)]
    x, y = [torch.randn(size, dtype=torch.double) for size in sizes], torch.arange(n) % 3
    made(x)
    model = bpk.extend(made)
    with warnings.catch_warnings(), bpk.backpack(E.BatchGrad()):
        warnings.simplefilter("error")
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        each = [torch.autograd.grad(loss_fn(model(x[k : k + 1]), y[k : k + 1]) / n, p)[0] for k in range(n)]
        torch.testing.assert_close(p.grad_batch, torch.stack(each))


class Words(nn.Module):
    """A language model that is given labels and a mask, too, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, *tensors: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.table(tensors[0]).tanh()).flatten(0, 1), tensors[1].flatten())


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_tensors_beside_one_sentence_are_no_list(steps: int, count: int) -> None:
    """With as many words as there are tensors, these might be a list of so many samples."""
    model = bpk.extend(Words().double())
    given = [torch.randint(5, (1, steps)) for _ in range(count)]
    with bpk.backpack(E.BatchGrad()):
        model(*given).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch, p.grad[None])


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize(
    "function",
    [torch.inverse, torch.matrix_exp, lambda u: u.cumsum(0), lambda u: torch.linalg.qr(u)[0], lambda u: u / u.amax()],
    ids=["inverse", "exponential", "cumsum", "qr", "scaled"],
)
def test_weights_that_are_products_of_functions_of_parameters(function: Any, n: int) -> None:
    """Such a product has no samples, also where these are as many as its rows."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (function(self.turn) @ self.scale)

    torch.manual_seed(0)
    check(Weights(), torch.randn(n, 4, dtype=torch.double), torch.arange(n) % 3)


def test_numbers_put_together() -> None:
    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)
            self.start, self.end = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.25))

        def forward(self, x: Tensor) -> Tensor:
            times = torch.stack([self.start, self.end]).cumsum(0)
            total = times[0] + times[1]
            return self.last((self.first(x) + total).tanh() * self.start)

    torch.manual_seed(0)
    check(Times(), torch.randn(3, 4, dtype=torch.double), torch.arange(3))


FLAT = {
    "inside": lambda x, weight: F.linear(x, 2 * weight).flatten(0, 1),
    "before": lambda x, weight: F.linear(x.flatten(0, 1), 2 * weight),
}


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("place", [*FLAT, "by a layer"])
@pytest.mark.parametrize(("n", "steps"), [(2, 3), (3, 2), (3, 3)])
def test_predictions_that_are_flattened_where_functions_alone_use_parameters(n: int, steps: int, place: str) -> None:
    """In first order alone, too: there, only calls with parameters were looked at."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.double))
            self.flatten = nn.Flatten(0, 1)

        def forward(self, x: Tensor) -> Tensor:
            return FLAT[place](x, self.weight) if place in FLAT else self.flatten(F.linear(x, 2 * self.weight))

    torch.manual_seed(0)
    model, loss_fn = Flat(), nn.CrossEntropyLoss()
    x, y = torch.randn(n, steps, 4, dtype=torch.double), torch.randint(3, (n * steps,))
    parts = [loss_fn(model(x[k : k + 1]), y[steps * k :][:steps]) / n for k in range(n)]
    rows = torch.stack([torch.autograd.grad(part, model.weight)[0] for part in parts])
    model, loss_fn = bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(E.BatchGrad(), E.Variance()):
        loss_fn(model(x), y).backward()
    torch.testing.assert_close(model.weight.grad_batch, rows)
    torch.testing.assert_close(model.weight.variance, rows.var(0, unbiased=False))


class Positions(nn.Module):
    """What is known of positions, added to what functions make of data: no layer sees these."""

    def __init__(self, of: str, scaled: bool = True) -> None:
        super().__init__()
        self.scale, self.scaled = nn.Parameter(torch.randn(4)), scaled
        self.of = nn.Embedding(5, 4) if of == "table" else nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        known = self.of(steps if isinstance(self.of, nn.Embedding) else steps[:, None].to(x.dtype))
        return torch.tanh((x * self.scale if self.scaled else x) + known)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("flat", [False, True], ids=["as they are", "flattened"])
@pytest.mark.parametrize("of", ["table", "network"])
@pytest.mark.parametrize(("n", "steps"), [(3, 2), (2, 3), (2, 4)])
def test_positions_beside_functions_with_parameters(n: int, steps: int, of: str, flat: bool) -> None:
    """Positions are no samples, though each may be one by the graph alone: the model was given as many as it was."""

    def objective(out: Tensor, y: Tensor) -> Tensor:
        return loss_fn(out.flatten(0, 1), y.flatten()) if flat else loss_fn(out.transpose(1, 2), y)

    torch.manual_seed(0)
    model, loss_fn = Positions(of).double(), nn.CrossEntropyLoss()
    x, y = torch.randn(n, steps, 4, dtype=torch.double), torch.randint(4, (n, steps))
    params = list(model.parameters())
    parts = [objective(model(x[k : k + 1]), y[k : k + 1]) / n for k in range(n)]
    rows = [torch.stack(every) for every in zip(*[torch.autograd.grad(part, params) for part in parts], strict=True)]
    model, loss_fn = bpk.extend(model), bpk.extend(loss_fn)
    for more in ([], [E.BatchDiagGGNExact()]):
        with bpk.backpack(E.BatchGrad(), *more):
            objective(model(x), y).backward()
        for p, expected in zip(params, rows, strict=True):
            torch.testing.assert_close(bpk.fields_of(p).grad_batch, expected)


def test_positions_alone_are_taken_for_samples_and_the_user_is_told() -> None:
    """Nothing else has parameters, or sees data: that samples are those of the model's is not known."""
    model, loss_fn = bpk.extend(Positions("table", scaled=False)), bpk.extend(nn.CrossEntropyLoss())
    told = pytest.warns(UserWarning, match=r"given 3 rows of 2(?s:.*)is a guess: no layer sees them")
    with told, bpk.backpack(E.BatchGrad()):
        loss_fn(model(torch.randn(3, 2, 4)).flatten(0, 1), torch.arange(6) % 4).backward()


class Centred(nn.Module):
    """Words that functions have changed before they are looked up; the batch is centred behind that."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.words, self.last, self.change = nn.Embedding(6, 3), nn.Linear(3, 3), change

    def forward(self, words: Tensor) -> Tensor:
        changed = words.clone() if self.change == "copied" else words.flip(1) + torch.arange(2)
        h = self.words(changed).mean(1)
        return self.last((h - h.mean(0)).tanh())


@pytest.mark.parametrize("change", ["copied", "shifted"])
def test_copies_of_data_are_no_positions(change: str) -> None:
    """That samples mix behind them was not seen: as a table of positions, words would feed all of them."""
    model, loss_fn = bpk.extend(Centred(change)), bpk.extend(nn.CrossEntropyLoss())
    words, y = torch.randint(3, (4, 2)), torch.arange(4) % 3
    with pytest.warns(UserWarning, match="Rows are not samples"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(words), y).backward()
    with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchDiagGGNExact()):
        loss_fn(model(words), y).backward()
