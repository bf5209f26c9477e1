"""Mixtures of experts that are sent tokens of the data itself, with nothing but functions in front."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

EXPERTS, CLASSES = 3, 2

Sent = Callable[[nn.ModuleList, Tensor, Tensor], Tensor]
"""Experts, rows `[R, D]` and the expert `[R]` of each, to results `[R, D]`."""


def by_index(experts: nn.ModuleList, rows: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for k, expert in enumerate(experts):
        where = (chosen == k).nonzero()[:, 0]
        out = out.index_add(0, where, expert(rows[where]))
    return out


def by_mask(experts: nn.ModuleList, rows: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for k, expert in enumerate(experts):
        out[chosen == k] = expert(rows[chosen == k])
    return out


def sorted_by_expert(experts: nn.ModuleList, rows: Tensor, chosen: Tensor) -> Tensor:
    order, counts = chosen.argsort(), chosen.bincount(minlength=len(experts)).tolist()
    parts = [expert(part) for expert, part in zip(experts, rows[order].split(counts), strict=True)]
    return torch.zeros_like(rows).index_copy(0, order, torch.cat(parts))


def with_capacity(experts: nn.ModuleList, rows: Tensor, chosen: Tensor) -> Tensor:
    """Each expert has room for all rows; what is left is filled with zeros."""
    every = torch.arange(len(rows))
    place = nn.functional.one_hot(chosen, len(experts)).cumsum(0)[every, chosen] - 1
    sent = rows.new_zeros(len(experts), len(rows), len(rows))
    sent[chosen, place, every] = 1
    results = torch.stack([expert(matrix @ rows) for expert, matrix in zip(experts, sent, strict=True)])
    return torch.einsum("ecr,ecd->rd", sent, results)


class Mixture(nn.Module):
    """`[N, T, D]` to rows `[N T, C]`, the last layer sees tokens one by one, or the samples' axis."""

    def __init__(self, width: int, sent: Sent, merged: bool) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(width, EXPERTS), nn.Linear(width, CLASSES)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2), nn.GELU(), nn.Linear(2, width)) for _ in range(EXPERTS)]
        )
        self.sent, self.merged = sent, merged

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.gate(rows).softmax(-1).max(-1)
        rows = rows + share[:, None] * self.sent(self.experts, rows, chosen)
        out: Tensor = self.last(rows if self.merged else rows.view(x.shape))
        return out.reshape(-1, CLASSES)


class Words(nn.Module):
    """Each word is looked up in one of two tables, as its number says."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.last = nn.ModuleList([nn.Embedding(3, 3), nn.Embedding(3, 3)]), nn.Linear(3, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        rows = words.reshape(-1)
        out = torch.zeros(len(rows), 3, dtype=self.last.weight.dtype)
        for k, table in enumerate(self.tables):
            where = (rows // 3 == k).nonzero()[:, 0]
            out = out.index_copy(0, where, table(rows[where] - 3 * k).tanh())
        result: Tensor = self.last(out)
        return result


def compare(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Quantities of single samples, against passes of one sample each."""
    n = len(x)
    plain, loss_fn = nn.CrossEntropyLoss(), bpk.extend(nn.CrossEntropyLoss())
    params = list(model.parameters())
    rows = []
    for k in range(n):
        found = torch.autograd.grad(plain(model(x[[k]]), y[k]) / n, params, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)])
    bpk.extend(model)
    for quantities in ((E.BatchGrad(), E.BatchL2Grad()), (E.BatchDiagGGNExact(), E.DiagGGNExact())):
        with bpk.backpack(*quantities):
            loss_fn(model(x), y.flatten()).backward()
    for k, p in enumerate(params):
        each = torch.stack([row[k] for row in rows])
        torch.testing.assert_close(p.grad_batch, each)
        torch.testing.assert_close(p.batch_l2, each.flatten(1).square().sum(1))
        assert p.diag_ggn_exact_batch.shape == each.shape
        torch.testing.assert_close(p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact)


@pytest.mark.parametrize("merged", [True, False], ids=["tokens one by one", "samples"])
@pytest.mark.parametrize("sent", [by_index, by_mask, sorted_by_expert, with_capacity], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(2, 3, 3), (4, 3, 3), (3, 2, 4), (3, 3, 2)], ids=str)
def test_tokens_that_experts_are_sent_are_no_samples(shape: tuple[int, int, int], sent: Sent, merged: bool) -> None:
    """Tokens, or steps, had counted as samples where an expert is sent others than so many of each sample, in order."""
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Mixture(shape[2], sent, merged).double(), torch.randn(shape).double()
        compare(model, x, torch.randint(CLASSES, shape[:2]))


@pytest.mark.parametrize("shape", [(4, 3), (4, 4), (5, 2)], ids=str)
def test_words_of_several_tables(shape: tuple[int, int]) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        compare(Words().double(), torch.randint(6, shape), torch.randint(CLASSES, shape))
