"""A batch given in parts to layers that know their batch axis: one sentence after the other, or length by length."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import told
from tests.references.hessian_diagonals import of_loss

Parts = Sequence[Tensor]


class Sentences(nn.Module):
    """Classifies what a recurrent layer has made of words or of vectors; of a list, one tensor after the other."""

    def __init__(self, words: bool = False, alone: bool = False) -> None:
        super().__init__()
        self.first: nn.Module = nn.Embedding(7, 2) if words else nn.Linear(2, 2)
        self.rnn, self.head, self.alone = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 3), alone

    def forward(self, parts: Tensor | Parts) -> Tensor:
        each = [parts] if isinstance(parts, Tensor) else parts
        hidden = [self.first(part[None] if self.alone else part) for part in each]
        return self.head(torch.cat([self.rnn(h)[0][:, -1] for h in hidden]))


class Attentive(nn.Module):
    """The same with attention, and each call is of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return self.head((x + self.attention(x, x, x)[0]).mean(1))


class Joined(nn.Module):
    """Calls a model for each part, and joins what it says: as the loop of a training step does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: Parts) -> Tensor:
        return torch.cat([self.model(part) for part in parts])


def vectors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def words(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randint(7, shape) for shape in shapes]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "calls of one": (lambda: Joined(Sentences()), lambda: vectors((1, 2, 2), (1, 3, 2), (1, 1, 2))),
    "calls of one, alike": (lambda: Joined(Sentences()), lambda: vectors(*[(1, 3, 2)] * 3)),
    "calls of one, with attention": (lambda: Joined(Attentive()), lambda: vectors((1, 2, 2), (1, 3, 2), (1, 1, 2))),
    "calls of one, with words": (lambda: Joined(Sentences(words=True)), lambda: words((1, 2), (1, 3), (1, 2))),
    "calls of two": (lambda: Joined(Sentences()), lambda: vectors((2, 3, 2), (2, 3, 2))),
    "calls of two, with attention": (lambda: Joined(Attentive()), lambda: vectors((2, 3, 2), (2, 4, 2))),
    "calls of one and two": (lambda: Joined(Sentences()), lambda: vectors((1, 3, 2), (2, 3, 2))),
    "a list": (lambda: Sentences(alone=True), lambda: vectors((2, 2), (3, 2), (1, 2))),
    "a list, alike": (lambda: Sentences(alone=True), lambda: vectors(*[(3, 2)] * 4)),
    "a list of words": (lambda: Sentences(words=True, alone=True), lambda: words((2,), (3,), (1,), (4,))),
    "a list of words, alike": (lambda: Sentences(words=True, alone=True), lambda: words(*[(2,)] * 3)),
    "a list of lengths": (lambda: Sentences(), lambda: vectors((2, 3, 2), (2, 4, 2))),
    "a list of one and two": (lambda: Sentences(), lambda: vectors((1, 3, 2), (2, 4, 2))),
}
"""A model, and the parts that it is given."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error:.*rows", "ignore:.*generic way")
def test_rows_are_samples(name: str) -> None:
    make, data = CASES[name]
    model, parts = make().double(), data()
    single = isinstance(model, Sentences) and model.alone
    alone = parts if single else [part[[k]] for part in parts for k in range(len(part))]
    y = torch.arange(len(alone)) % 3
    losses = [cross_entropy(model([x]), y[[n]]) / len(y) for n, x in enumerate(alone)]
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    diagonals = [of_loss(model, loss) for loss in losses]

    extended = model.model if isinstance(model, Joined) else model
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(extended)
    with bpk.backpack(E.BatchGrad(), E.BatchDiagHessian(), E.SqrtGGNExact(), E.DiagGGNExact()):
        loss_fn(model(parts), y).backward()
    for k, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad_batch, torch.stack([of_sample[k] for of_sample in gradients]))
        torch.testing.assert_close(p.diag_h_batch, torch.stack([of_sample[k] for of_sample in diagonals]))
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact)


def test_calls_that_alternate_are_of_the_same_samples() -> None:
    """Rows `[N, K]` of `K` frames, as one axis: the samples are those that each call sees."""
    model, loss_fn = bpk.extend(Sentences().double()), bpk.extend(nn.CrossEntropyLoss())
    frames, y = vectors((3, 4, 2), (3, 4, 2)), torch.randint(3, (3, 2))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(torch.stack([model(x) for x in frames], 1).flatten(0, 1), y.flatten()).backward()
    for n in range(3):
        loss = cross_entropy(torch.cat([model(x[[n]]) for x in frames]), y[n]) / 3
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad)


class Words(nn.Module):
    """Classifies every word; what stands in front of the head knows its batch axis, or does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {
            "rnn": lambda: nn.GRU(2, 2, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        }
        self.kind, self.layer, self.head = kind, made.get(kind, lambda: nn.Linear(2, 2))(), nn.Linear(2, 3)

    def forward(self, x: Tensor | Parts, y: Parts | None = None) -> Tensor:
        if y is not None:  # sentences one by one, without a batch axis
            return cross_entropy(torch.cat([self.words(part[None])[0] for part in x]), torch.cat([*y]))
        if not isinstance(x, Tensor):
            return torch.cat([self.words(part).flatten(0, 1) for part in x])
        return self.words(x)

    def words(self, x: Tensor) -> Tensor:
        if self.kind == "attention":
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return self.head(self.layer(x, x, x)[0])
        return self.head(self.layer(x)[0] if self.kind == "rnn" else self.layer(x).tanh())


SENTENCES = {
    "one by one": [(1, 2), (1, 4), (1, 1), (1, 3)],
    "one by one, alike": [(1, 3)] * 3,
    "two each": [(2, 3), (2, 3)],
    "by length": [(2, 3), (3, 2)],
    "as many rows": [(2, 2), (1, 4)],
}
"""How many sentences, of how many words, each part has."""


@pytest.mark.parametrize("kind", ["rnn", "attention", "linear"])
@pytest.mark.parametrize("sizes", SENTENCES.values(), ids=SENTENCES)
@pytest.mark.parametrize("given", ["calls", "a list", "a list with labels"])
@pytest.mark.filterwarnings("error:.*rows", "ignore:.*generic way")
def test_words_of_sentences_in_parts(kind: str, sizes: list[tuple[int, int]], given: str) -> None:
    """A loss with a term for each word: samples are the sentences of all parts, and not those of each."""
    model, parts = Words(kind).double(), vectors(*[(*size, 2) for size in sizes])
    alone = [part[[k]] for part in parts for k in range(len(part))]
    y = [torch.randint(3, x.shape[:2]) for x in alone]
    count = sum(map(torch.numel, y))
    losses = [cross_entropy(model(x)[0], t[0], reduction="sum") / count for x, t in zip(alone, y, strict=True)]
    expected = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact(), E.DiagGGNExact(), E.ClippedGrad(0.5)):
        if given == "a list with labels":
            model([x[0] for x in alone], [t[0] for t in y]).backward()
        else:
            out = model(parts) if given == "a list" else torch.cat([model(x).flatten(0, 1) for x in parts])
            loss_fn(out, torch.cat([t.flatten() for t in y])).backward()
    norms = torch.stack([sum(g.square().sum() for g in grads) for grads in expected]).sqrt() * len(alone)  # type: ignore
    weights = (0.5 / norms).clamp(max=1)
    for k, p in enumerate(model.parameters()):
        rows = torch.stack([grads[k] for grads in expected])
        torch.testing.assert_close(p.grad_batch, rows)
        torch.testing.assert_close(p.clipped_grad, torch.tensordot(weights, rows, 1))
        torch.testing.assert_close(p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("joined", [True, False], ids=["along time", "one behind another"])
def test_pieces_of_a_sentence_are_of_the_same_samples(n: int, joined: bool) -> None:
    """Their words are joined along time, or a state goes from call to call: samples are those that each call sees."""
    rnn, head = nn.GRU(2, 2, batch_first=True).double(), nn.Linear(2, 3).double()
    model, loss_fn = bpk.extend(nn.ModuleList([rnn, head])), bpk.extend(nn.CrossEntropyLoss())
    x, y = vectors((n, 4, 2))[0], torch.randint(3, (n, 4))

    def passed(x: Tensor) -> list[Tensor]:
        states, found = None, []
        for piece in x.split(2, 1):
            h, states = rnn(piece, None if joined else states)
            found.append(head(h))
        return found

    with bpk.backpack(E.BatchGrad()):
        loss_fn(torch.cat(passed(x), 1).flatten(0, 1), y.flatten()).backward()
    for k in range(n):
        loss = cross_entropy(torch.cat(passed(x[[k]]), 1)[0], y[k], reduction="sum") / y.numel()
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(p.grad_batch[k], grad)


Objective = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]

PARTS: dict[str, Objective] = {
    "one by one": lambda m, loss, x, y: torch.stack([loss(m(x[k : k + 1]), y[k : k + 1]) for k in range(4)]).mean(),
    "halves": lambda m, loss, x, y: loss(m(x[:2]), y[:2]) + loss(m(x[2:]), y[2:]),
    "the second half first": lambda m, loss, x, y: loss(m(x.chunk(2)[1]), y[2:]) + loss(m(x.chunk(2)[0]), y[:2]),
}
VIEWS: dict[str, Objective] = {
    "the same": lambda m, loss, x, y: loss(m(x), y) + loss(m(x), y.flip(0)),
    "two views of each": lambda m, loss, x, y: loss(m(x[::2]), y[:2]) + loss(m(x[1::2]), y[:2]),
    "another batch": lambda m, loss, x, y: loss(m(x), y) + loss(m(x.flip(0)), y),
    "some in common": lambda m, loss, x, y: loss(m(x[:3]), y[:3]) + loss(m(x[1:]), y[1:]),
}


@pytest.mark.parametrize("name", [*PARTS, *VIEWS])
def test_losses_of_different_rows_of_one_tensor_are_told(name: str) -> None:
    """Samples of several losses count as the same ones, which slices of a batch are not."""
    model, loss_fn = bpk.extend(nn.Linear(3, 3)), bpk.extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings(record=True) as found, bpk.backpack(E.BatchGrad()):
        warnings.simplefilter("always")
        (PARTS | VIEWS)[name](model, loss_fn, torch.randn(4, 3), torch.tensor([0, 1, 2, 0])).backward()
    told = [each for each in found if "sees other rows than a loss before, of the same tensor" in str(each.message)]
    assert len(told) == (name in PARTS)


def layers(*shape: int) -> tuple[nn.Sequential, Tensor]:
    """A network, and samples for it."""
    torch.manual_seed(0)
    first = nn.Conv1d(2, 3, 2) if len(shape) == 3 else nn.Linear(shape[-1], 3)
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double(), vectors(shape)[0]


@pytest.mark.parametrize("approximation", ["default", "expand", "reduce"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4)], ids=["linear", "convolution"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_factors_of_parts_are_those_of_the_batch(approximation: str, shape: tuple[int, ...], size: int) -> None:
    """Rows of different samples had been added up as positions of one, or refused."""
    (model, x), y, found = layers(*shape), torch.arange(5) % 3, []
    model(x)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model)
    for parts in ([x], x.split(size)):
        with bpk.backpack(E.KFLR(approximation)):
            loss_fn(torch.cat([model(part) for part in parts]), y).backward()
        found.append([p.kflr for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_factors_of_parts_with_samples_in_common_are_refused() -> None:
    """The layer is called twice for each part: neither the same samples each time, nor others."""
    layer, head, x, y = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), vectors((4, 3))[0], torch.arange(4) % 3
    bpk.extend(nn.ModuleList([layer, head]))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with told(UnsupportedLayer, "or other samples"), bpk.backpack(E.KFLR("expand")):
        loss_fn(torch.cat([head(layer(layer(part).tanh())) for part in x.split(2)]), y).backward()
