"""Samples side by side in one sequence: attention sees one row, and a mask keeps samples apart (as Pixtral does)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchDiagGGNExact, BatchDiagHessian, BatchGrad, DiagGGNExact, DiagHessian

SAMPLES, PIECES, WIDTH, CLASSES = 3, 4, 4, 3


class Packed(nn.Module):
    """Pieces of all images are one sequence, in which each attends to those of its own image."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, WIDTH, 2, stride=2)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.cat([image.flatten(1).T for image in self.conv(x)])[None]
        own = torch.arange(len(x)).repeat_interleave(PIECES)
        q, k = self.query(pieces)[:, None], pieces[:, None]
        seen = pieces + F.scaled_dot_product_attention(q, k, k, attn_mask=own[:, None] == own)[:, 0]
        if self.each:
            return self.head(seen)[0]
        return self.head(seen.view(len(x), PIECES, WIDTH).mean(1))


def problem(each: bool) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = bpk.extend(Packed(each).double())
    x = torch.randn(SAMPLES, 2, 4, 4, dtype=torch.float64)
    return model, bpk.extend(nn.CrossEntropyLoss()), x, torch.randint(CLASSES, (SAMPLES * (PIECES if each else 1),))


@pytest.mark.parametrize("each", [False, True], ids=["images", "pieces"])
def test_individual_gradients(each: bool) -> None:
    model, loss_fn, x, y = problem(each)
    with bpk.backpack(BatchGrad()):
        loss_fn(model(x), y).backward()
    terms = F.cross_entropy(model(x), y, reduction="none").view(SAMPLES, -1).sum(1) / len(y)
    for n, term in enumerate(terms):
        expected = torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad)


@pytest.mark.parametrize("each", [False, True], ids=["images", "pieces"])
def test_second_order(each: bool) -> None:
    quantities = (BatchDiagGGNExact(), DiagGGNExact(), DiagHessian())
    bpk.verify(*problem(each), *quantities, raise_on_error=True)


@pytest.mark.processor("elsewhere torch differentiates it twice")
def test_what_cannot_be_differentiated_twice_is_refused_by_sample_and_not_remembered_for_sums() -> None:
    model, loss_fn, x, y = problem(each=False)
    with pytest.raises(NotImplementedError, match="differentiated twice"), bpk.backpack(BatchDiagHessian()):
        loss_fn(model(x), y).backward()
    for _ in range(2):
        with bpk.backpack(DiagGGNExact(), BatchGrad()):
            loss_fn(model(x), y).backward()
        assert model.query.weight.grad_batch.shape == (SAMPLES, WIDTH, WIDTH)
        with bpk.backpack(DiagHessian()):
            loss_fn(model(x), y).backward()
    assert model.query.weight.diag_h.shape == (WIDTH, WIDTH)


class Words(nn.Module):
    """Pieces of each image stand in front of its words; all layers but the first see the samples apart."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.table, self.head = Packed(each=True), nn.Embedding(5, CLASSES), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        pieces = self.packed(x).view(len(x), PIECES, CLASSES)
        return self.head(torch.cat([pieces, self.table(words)], 1).cumsum(1))


def test_rows_that_are_picked_behind_a_packed_sequence() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Words().double()), bpk.extend(nn.CrossEntropyLoss())
    x, words = torch.randn(SAMPLES, 2, 4, 4, dtype=torch.float64), torch.randint(5, (SAMPLES, 3))
    mask = torch.arange(PIECES + 3) < torch.tensor([[4], [7], [6]])
    y = torch.randint(CLASSES, mask.shape)
    with bpk.backpack(BatchGrad()):
        loss_fn(model(x, words)[mask], y[mask]).backward()
    logits = model(x, words)
    for n in range(SAMPLES):
        term = F.cross_entropy(logits[n][mask[n]], y[n][mask[n]], reduction="sum") / mask.sum()
        expected = torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad)


class PackedLayer(nn.Module):
    """The same with a layer that knows its batch axis, and is given a batch of one."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, WIDTH, 2, stride=2), nn.Linear(WIDTH, CLASSES)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.cat([image.flatten(1).T for image in self.conv(x)])[None]
        own = torch.arange(len(x)).repeat_interleave(PIECES)
        mask = own[:, None] != own if self.apart else None
        seen = pieces + self.attention(pieces, pieces, pieces, attn_mask=mask, need_weights=False)[0]
        return self.head(seen.view(len(x), PIECES, WIDTH).mean(1))


@pytest.mark.parametrize("apart", [True, False])
def test_a_layer_with_parameters_is_given_all_samples_in_one_row(apart: bool) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(PackedLayer(apart).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(SAMPLES, 2, 4, 4, dtype=torch.float64), torch.arange(SAMPLES)
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        loss_fn(model(x), y).backward()
    terms = F.cross_entropy(model(x), y, reduction="none") / SAMPLES
    for n, term in enumerate(terms if apart else [terms.sum()]):  # images that attend to each other are one sample
        expected = torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad)
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, DiagGGNExact(), DiagHessian())
