"""As many draws of each sample as there are samples, in front of all layers: which axis is which?"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E


class Drawing(nn.Module):
    """Predictions `[K N, C]` of `k` draws."""

    def __init__(self, draw: Callable[[Tensor, int], Tensor], k: int) -> None:
        super().__init__()
        self.first, self.last, self.draw, self.k = nn.Linear(3, 4), nn.Linear(4, 3), draw, k

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.draw(x, self.k)).tanh()).flatten(0, 1)


def expanded(x: Tensor, k: int) -> Tensor:
    return x.expand(k, -1, -1)


def noisy(x: Tensor, k: int) -> Tensor:
    return x + 0.1 * torch.arange(k).reshape(k, 1, 1)


def told_and_right(draw: Callable[[Tensor, int], Tensor], n: int, k: int) -> tuple[bool, bool]:
    """Whether the user is told of a guess, and whether individual gradients are those of plain autograd."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Drawing(draw, k).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(n, 3).double(), torch.randint(3, (k * n,))
    with warnings.catch_warnings(record=True) as found, bpk.backpack(E.BatchGrad()):
        warnings.simplefilter("always")
        loss_fn(model(x), y).backward()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").reshape(k, n).sum(0) / len(y)
    rows = torch.stack([torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0] for loss in losses])
    grads = model.first.weight.grad_batch
    return any("is a guess" in str(w.message) for w in found), rows.shape == grads.shape and torch.allclose(rows, grads)


@pytest.mark.parametrize(("n", "k"), [(4, 4), (3, 3), (4, 2), (2, 4)])
def test_strides_of_expanded_data_tell(n: int, k: int) -> None:
    assert told_and_right(expanded, n, k) == (False, True)


@pytest.mark.parametrize(("n", "k"), [(3, 3), (4, 4), (2, 4), (3, 6)])
def test_who_draws_as_often_as_there_are_samples_or_a_multiple_is_told(n: int, k: int) -> None:
    assert told_and_right(noisy, n, k)[0]


@pytest.mark.parametrize(("n", "k"), [(4, 2), (5, 3), (4, 3)])
def test_other_numbers_of_draws_are_no_guess(n: int, k: int) -> None:
    assert told_and_right(noisy, n, k) == (False, True)
