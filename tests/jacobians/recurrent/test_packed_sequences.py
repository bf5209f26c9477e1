"""Packed sequences: autograd carries what travels through the layer, and each sample has what it has alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import told

READS = ("last", "all", "mean", "rows")
"""What the head is given: the last state, all states (padded), their mean, or the rows of the packed sequence."""


class Reader(nn.Module):
    """A recurrent layer on packed sequences of words or numbers, and a head."""

    def __init__(self, layer: nn.RNNBase, reads: str, words: bool, in_order: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4) if words else nn.Linear(4, 4)
        self.layer, self.reads, self.in_order = layer, reads, in_order
        self.head = nn.Linear(3 if reads == "last" or not layer.bidirectional else 6, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(x)
        x, first = (x, True) if self.layer.batch_first else (x.transpose(0, 1), False)
        out, state = self.layer(pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.in_order))
        if self.reads == "last":
            return self.head((state[0] if isinstance(state, tuple) else state)[-1])
        if self.reads == "rows":
            return self.head(out.data)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(padded.sum(1) / lengths[:, None] if self.reads == "mean" else padded)


def loss_of(model: Reader, loss_fn: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch; of steps that are padding there is none."""
    out = model(x, lengths)
    if model.reads == "rows":
        y = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=model.in_order).data
    elif model.reads == "all":
        y = y[:, : out.shape[1]].masked_fill(torch.arange(out.shape[1]) >= lengths[:, None], -100)
        out = out.transpose(1, 2)
    else:
        y = y[:, 0]
    found: Tensor = loss_fn(out, y)
    return found


LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"batch_first": True}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "rnn": (nn.RNN, {"num_layers": 2, "batch_first": True}),
}

BATCHES = ([4, 1, 3], [1, 4, 3], [3, 3, 3], [4, 2, 4, 2])
"""Lengths of sequences; the first two have the same shapes."""


def batches(words: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Sequences, their lengths, and labels."""
    for lengths in BATCHES:
        n, most = len(lengths), max(lengths)
        x = torch.randint(7, (n, most)) if words else torch.randn(n, most, 4, dtype=torch.float64)
        yield x, torch.tensor(lengths), torch.randint(5, (n, most))


@pytest.mark.parametrize(("kind", "reads"), list(product(LAYERS, READS)))
def test_each_sample_has_what_it_has_alone(kind: str, reads: str) -> None:
    torch.manual_seed(0)
    make, options = LAYERS[kind]
    words = kind == "lstm"
    model = bpk.extend(Reader(make(4, 3, **options), reads, words, in_order=False).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    for x, lengths, y in batches(words):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "(?s)These go the generic way")
            with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
                loss_of(model, loss_fn, x, lengths, y).backward()
        whole = {name: (p.grad_batch, p.diag_ggn_exact_batch) for name, p in model.named_parameters()}
        for n in range(len(x)):
            one = slice(n, n + 1)
            with bpk.backpack(E.DiagGGNExact()):
                model.zero_grad()
                loss_of(model, loss_fn, x[one], lengths[one], y[one]).backward()
            for name, p in model.named_parameters():
                grads, diagonals = whole[name]
                torch.testing.assert_close(grads[n], torch.zeros_like(p) if p.grad is None else p.grad)
                torch.testing.assert_close(diagonals[n], p.diag_ggn_exact)


def test_other_quantities_are_those_of_padded_sequences() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([4, 3, 1])
    x, y = torch.randint(7, (3, 4)), torch.randint(5, (3, 4))
    model = bpk.extend(Reader(nn.LSTM(4, 3, batch_first=True), "all", True, True).double())

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer, self.head = model.embedding, nn.LSTM(4, 3, batch_first=True), model.head
            self.layer.load_state_dict(model.layer.state_dict())
            self.reads = "all"

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(self.embedding(x))[0])
            return out

    padded, loss_fn = bpk.extend(Padded().double()), bpk.extend(nn.CrossEntropyLoss())
    for extension in (E.DiagHessian(), E.Variance(), E.BatchL2Grad(), E.KFLR(), E.GGNGram()):
        found = []
        for one in (model, padded):
            with bpk.backpack(extension):
                loss_of(one, loss_fn, x, lengths, y).backward()  # type: ignore[arg-type]
            each = [getattr(p, extension.savefield) for p in one.layer.parameters()]
            found.append([value[0] if isinstance(value, list) else value for value in each])  # padding has inputs, too
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert bpk.verify(model, First(), (x, lengths), y, E.HMP(), E.KFRA()).ok


class First(nn.Module):
    """The cross-entropy of the first step alone, which all sequences have."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out[:, 0], y[:, 0])


def test_an_initial_state_and_dropout() -> None:
    """Nothing is drawn again: what travels passes the graph of this forward pass."""
    torch.manual_seed(0)

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.layer = nn.Linear(2, 6), nn.GRU(4, 3, 2, dropout=0.5)

        def forward(self, x: PackedSequence, start: Tensor) -> Tensor:
            state: Tensor = self.layer(x, self.start(start).view(-1, 2, 3).transpose(0, 1).contiguous())[1]
            return state[-1]

    model, loss_fn = bpk.extend(Started().double()), bpk.extend(nn.MSELoss(reduction="sum"))
    x, lengths = torch.randn(4, 3, 4, dtype=torch.float64), torch.tensor([4, 2, 1])
    packed = pack_padded_sequence(x, lengths)
    loss = loss_fn(model(packed, torch.randn(3, 2, dtype=torch.float64)), torch.zeros(3, 3, dtype=torch.float64))
    params = [model.start.weight, model.layer.weight_hh_l0]
    grads = torch.autograd.grad(loss, params, create_graph=True)
    expected = []
    for p, grad in zip(params, grads, strict=True):
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten()[k] for k, g in enumerate(grad.flatten())]
        expected.append(torch.stack(rows).view_as(p))
    with bpk.backpack(E.DiagHessian(), E.BatchGrad()):
        loss.backward()
    for p, diagonal in zip(params, expected, strict=True):
        torch.testing.assert_close(p.diag_h, diagonal)
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


class Rows(nn.Module):
    """A head on the rows of a packed sequence, in an order that it returns with them."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Linear(4, 4), nn.GRU(4, 3, batch_first=True), nn.Linear(3, 5)
        self.order = order

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(x)
        if self.order == "sorted":
            lengths, order = lengths.sort(descending=True)
            x, y = x[order], y[order]
        packed, labels = pack(x, lengths), pack(y, lengths).data
        out = self.layer(packed)[0]
        if self.order == "roll":
            return self.head(out.data.roll(1, 0)), labels.roll(1)
        if self.order in ("sorted", "twice"):
            return self.head(torch.cat([out.data] * (1 + (self.order == "twice")))), labels
        padded = pad_packed_sequence(out, batch_first=True)[0]
        if self.order == "flip":
            return self.head(pack(padded.flip(0), lengths.flip(0)).data), pack(y.flip(0), lengths.flip(0)).data
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return self.head(padded[mask]), y[:, : padded.shape[1]][mask]


def pack(x: Tensor, lengths: Tensor) -> PackedSequence:
    """Sequences, batch axis first, in the order in which they are."""
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


@pytest.mark.parametrize("order", ["mask", "roll", "flip", "sorted"])
def test_rows_in_another_order(order: str) -> None:
    """The samples are the sequences, in the order in which the model was given them, and not others that agree."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Rows(order).double()), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    for x, lengths, y in batches(words=False):
        with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
            loss_fn(*model(x, lengths, y)).backward()
        whole = {name: (p.grad_batch, p.diag_ggn_exact_batch) for name, p in model.named_parameters()}
        for n in range(len(x)):
            one, length = slice(n, n + 1), int(lengths[n])
            with bpk.backpack(E.DiagGGNExact()):
                model.zero_grad()
                loss_fn(*model(x[one, :length], lengths[one], y[one, :length])).backward()
            for name, p in model.named_parameters():
                torch.testing.assert_close(whole[name][0][n], p.grad)
                torch.testing.assert_close(whole[name][1][n], p.diag_ggn_exact)


def test_sequences_that_are_parts_of_samples() -> None:
    """Sentences of documents: the first two axes are one in front of the layer."""

    class Documents(Rows):
        def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layer(pack(x.flatten(0, 1), lengths.flatten()))[0]
            return self.head(out.data), pack(y.flatten(0, 1), lengths.flatten()).data

    model, loss_fn = bpk.extend(Documents("").double()), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    lengths = torch.tensor([[4, 1, 3], [2, 4, 2]])
    x, y = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.randint(5, (2, 3, 4))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(*model(x, lengths, y)).backward()
    params = [*model.layer.parameters(), *model.head.parameters()]
    for n in range(2):
        one = slice(n, n + 1)
        grads = torch.autograd.grad(loss_fn(*model(x[one], lengths[one], y[one])), params)
        for p, grad in zip(params, grads, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad)


@pytest.mark.parametrize("lengths", [[4, 1, 3], [2, 1, 1, 3]])
def test_rows_of_no_known_sequence_are_refused(lengths: list[int]) -> None:
    """Neither are steps samples, nor several sequences one, though that would agree with the graph."""
    model = bpk.extend(Rows("twice").double())
    x, y = torch.randn(len(lengths), 4, 4, dtype=torch.float64), torch.randint(5, (len(lengths), 4))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for extension in (E.BatchGrad(), E.BatchDiagGGNExact()):
        with told(UnsupportedLayer, "packed sequences"), bpk.backpack(extension):
            out, labels = model(x, torch.tensor(lengths), y)
            loss_fn(out, labels.repeat(2)).backward()


def test_batches_of_one_shape_in_other_orders() -> None:
    """What was found of one batch is nothing to believe of another, whose longest sequence is not the same."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(4, 3), nn.Linear(3, 2)

        def forward(self, x: PackedSequence) -> Tensor:
            out: Tensor = self.head(self.layer(x)[0].data)
            return out

    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Rows().double()), bpk.extend(nn.MSELoss(reduction="sum"))
    for lengths in torch.tensor([[3, 2, 1], [1, 2, 3], [2, 3, 1]]):
        x, y = torch.randn(3, 3, 4, dtype=torch.float64), torch.randn(3, 3, 2, dtype=torch.float64)

        def loss(some: slice, x: Tensor = x, y: Tensor = y, lengths: Tensor = lengths) -> Tensor:
            packed = [pack_padded_sequence(a[some], lengths[some], True, enforce_sorted=False) for a in (x, y)]
            found: Tensor = loss_fn(model(packed[0]), packed[1].data)
            return found

        with bpk.backpack(E.BatchGrad()):
            loss(slice(None)).backward()
        with bpk.disable():
            rows = [torch.autograd.grad(loss(slice(n, n + 1)), model.head.weight)[0] for n in range(3)]
        torch.testing.assert_close(model.head.weight.grad_batch, torch.stack(rows))
