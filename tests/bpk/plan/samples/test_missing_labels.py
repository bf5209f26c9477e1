"""Losses that see some of the rows that a model was given each: labels are missing, or a part of the batch has none."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import bpk
from bpk import extensions as E
from tests.references.hessian_diagonals import of_loss


class Tasks(nn.Module):
    """A trunk, whose units are silent for some samples, and a head for each task; the first one has steps, maybe."""

    def __init__(self, words: bool = False) -> None:
        super().__init__()
        self.words = words
        self.trunk = nn.Sequential(nn.Embedding(6, 5) if words else nn.Linear(5, 5), nn.Linear(5, 4), nn.ReLU())
        self.classes, self.values = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.classes(h), self.values(h.mean(1) if self.words else h)


Losses = tuple[nn.Module, nn.Module]
Objective = Callable[[nn.Module, Losses], Tensor]


def mask(*known: int) -> Tensor:
    return torch.tensor(known, dtype=torch.bool)


def check(model: nn.Module, objective: Objective, of_sample: Callable[[int], Tensor], n: int) -> None:
    """Compare fields of samples with plain autograd: its gradients, and its Hessian's diagonal."""
    losses = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
    extensions = E.BatchGrad(), E.Variance(), E.BatchDiagHessian(), E.DiagHessian(), E.BatchDiagGGNExact()
    for _ in range(2):  # what was found before is remembered
        with warnings.catch_warnings(), bpk.backpack(*extensions):
            warnings.simplefilter("error")
            objective(model, losses).backward()
    params = list(model.parameters())
    found = [[getattr(p, e.savefield) for e in extensions] for p in params]
    with bpk.disable():
        each = [of_sample(k) for k in range(n)]
        grads = [torch.autograd.grad(term, params, retain_graph=True, materialize_grads=True) for term in each]
        curved = [of_loss(model, term) for term in each]
    for k, (grad_batch, variance, diag_h_batch, diag_h, diag_ggn) in enumerate(found):
        expected = torch.stack([of_param[k] for of_param in grads])
        torch.testing.assert_close(grad_batch, expected)
        torch.testing.assert_close(variance, expected.var(0, unbiased=False))
        expected = torch.stack([of_param[k] for of_param in curved])
        torch.testing.assert_close(diag_h_batch, expected)
        torch.testing.assert_close(diag_h, expected.sum(0))
        torch.testing.assert_close(diag_ggn, expected)  # the network is of linear pieces


MASKS = {
    "as many": (mask(1, 1, 0, 1, 0, 1), mask(1, 0, 1, 1, 0, 1)),
    "as many others": (mask(1, 0, 0, 1, 0, 0), mask(0, 1, 1, 0, 0, 0)),
    "more": (mask(1, 1, 0, 1, 0, 1), mask(0, 1, 0, 0, 0, 0)),
    "all of one": (mask(1, 1, 1, 1, 1, 1), mask(0, 1, 0, 1, 1, 0)),
}


@pytest.mark.parametrize("name", MASKS)
def test_tasks_of_which_labels_are_missing(name: str) -> None:
    """As many labels had been taken for those of the same samples, without a word; others had been refused."""
    torch.manual_seed(0)
    (classes, values), model = MASKS[name], bpk.extend(Tasks().double())
    x, y, t = torch.randn(6, 5).double(), torch.randint(3, (6,)), torch.randn(6, 2).double()

    def objective(model: nn.Module, losses: Losses) -> Tensor:
        out = model(x)
        loss: Tensor = losses[0](out[0][classes], y[classes]) + 2 * losses[1](out[1][values], t[values])
        return loss

    def of_sample(n: int) -> Tensor:
        out = model(x[[n]])
        first = cross_entropy(out[0], y[[n]]) * classes[n] / classes.sum()
        return first + 2 * mse_loss(out[1], t[[n]]) * values[n] / values.sum()

    check(model, objective, of_sample, 6)


@pytest.mark.parametrize("values", [mask(1, 1, 1, 1), mask(1, 0, 1, 1)], ids=["of all", "of some"])
def test_words_that_were_masked_beside_sentences(values: Tensor) -> None:
    """The third sentence has no masked word. It had been refused as of another order in second order."""
    torch.manual_seed(0)
    model = bpk.extend(Tasks(words=True).double())
    x, y, t = torch.randint(6, (4, 3)), torch.randint(3, (4, 3)), torch.randn(4, 2).double()
    words = mask(1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1).reshape(4, 3)

    def objective(model: nn.Module, losses: Losses) -> Tensor:
        out = model(x)
        loss: Tensor = losses[0](out[0][words], y[words]) + losses[1](out[1][values], t[values])
        return loss

    def of_sample(n: int) -> Tensor:
        out = model(x[[n]])
        first = (cross_entropy(out[0][0], y[n], reduction="none") * words[n]).sum() / words.sum()
        return first + mse_loss(out[1], t[[n]]) * values[n] / values.sum()

    check(model, objective, of_sample, 4)


def test_a_part_of_the_batch_has_no_labels() -> None:
    """There are two views of each of the others, of which one says what the other should be: rows are samples."""
    torch.manual_seed(0)
    model = bpk.extend(Tasks().double())
    x, y = torch.randn(8, 5).double(), torch.randint(3, (2,))

    def objective(model: nn.Module, losses: Losses) -> Tensor:
        out, _ = model(x)
        loss: Tensor = losses[0](out[:2], y) + losses[1](out[5:], out[2:5].detach())
        return loss + 0 * losses[1](model(x)[1], torch.zeros(8, 2).double())

    with torch.no_grad(), bpk.disable():
        views = model(x)[0][2:5]

    def of_sample(n: int) -> Tensor:
        out, values = model(x[[n]])
        if n < 2:
            return cross_entropy(out, y[[n]]) / 2 + 0 * values.sum()
        return mse_loss(out, views[[n - 5]]) / 3 + 0 * values.sum() if n >= 5 else 0 * (out.sum() + values.sum())

    check(model, objective, of_sample, 8)
