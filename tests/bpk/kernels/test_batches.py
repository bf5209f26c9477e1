"""Batches of other forms than tensors, and models that return other things: `forward=` says how a model is called."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.kernels import Diagonal


class Tagger(nn.Module):
    """As models of transformers: it takes words and a mask, and returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, words: Tensor, mask: Tensor, scale: float = 1.0) -> SimpleNamespace:
        h = torch.tanh(self.embedding(words)) * mask[..., None]
        return SimpleNamespace(logits=self.head(h.sum(1) / mask.sum(1, keepdim=True)) * scale)


def batch(n: int, length: int = 5) -> dict[str, Any]:
    words = torch.randint(9, (n, length))
    return {
        "words": words,
        "mask": (torch.rand(n, length) < 0.7).double().index_fill(1, torch.tensor([0]), 1),
        "scale": 2.0,
    }


def logits(model: nn.Module, given: Any) -> Tensor:
    return model(**given).logits


def jacobian(model: nn.Module, given: Any) -> Tensor:
    """`[N, C, P]` by autograd."""
    out = logits(model, given)
    rows = [torch.autograd.grad(x, list(model.parameters()), retain_graph=True) for x in out.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, out.shape)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


@pytest.mark.parametrize("kind", ["full", "diagonal", "trace"])
@pytest.mark.parametrize("form", [dict, UserDict])
@pytest.mark.parametrize("length", [None, 5, 3])
def test_ntk(model: nn.Module, kind: str, form: Callable[[Any], Any], length: int | None) -> None:
    """Of one batch, of two that go through the model as one, and of sentences of other lengths."""
    x1, x2 = form(batch(4)), None if length is None else form(batch(2, length))
    j1 = jacobian(model, x1)
    full = torch.einsum("ncp,mdp->nmcd", j1, j1 if x2 is None else jacobian(model, x2))
    expected = {"full": full, "diagonal": full.diagonal(dim1=2, dim2=3), "trace": full.diagonal(dim1=2, dim2=3).sum(2)}
    before = dict(x1)
    torch.testing.assert_close(bpk.ntk(model, x1, x2, kind=kind, forward=logits), expected[kind])
    assert all(x1[key] is value for key, value in before.items()), "the batch stays as it was"


def test_predictive_covariance(model: nn.Module) -> None:
    variances = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    given = batch(4)
    j, flat = jacobian(model, given), torch.cat([v.flatten() for v in variances.values()])
    found = bpk.predictive_covariance(model, given, Diagonal(variances), forward=logits)
    torch.testing.assert_close(found, (j * flat) @ j.mT)


def test_functions_of_tensors_and_tuples(model: nn.Module) -> None:
    """A tuple goes to the function as it is."""
    given = batch(4)
    pair = (given["words"], given["mask"])
    found = bpk.ntk(model, pair, forward=lambda model, pair: model(*pair).logits)
    j = jacobian(model, {"words": pair[0], "mask": pair[1]})
    torch.testing.assert_close(found, torch.einsum("ncp,mdp->nmcd", j, j))


def test_refusals(model: nn.Module) -> None:
    given = batch(4)
    for wrong, what in (
        (lambda: bpk.ntk(model, given), r"got dict as x1(.|\n)*forward=lambda model, batch"),
        (lambda: bpk.ntk(model, given, forward="logits"), r"forward='logits', which is no function"),
        (lambda: bpk.ntk(model, {"scale": 1.0}, forward=logits), r"dict without any tensor as x1"),
        (lambda: bpk.ntk(model, given, forward=lambda model, x: model(**x)), r"forward= returned .*SimpleNamespace"),
        (lambda: bpk.ntk(model, given, forward=lambda model, x: x["words"]), r"returned a tensor of torch.int64"),
        (lambda: bpk.predictive_covariance(model, given, Diagonal({"head.bias": torch.ones(3)})), "got dict as x"),
    ):
        with pytest.raises(ValueError, match=what):
            wrong()
