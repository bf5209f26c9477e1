"""First order begins at losses that a model computes itself: they say which rows are which samples'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.helpers import told

Loss = Callable[..., Tensor]
D = torch.float64


class Tied(nn.Module):
    """Words are predicted by the matrix that has embedded them: a function, between the last layer and the loss."""

    def __init__(self, inside: Loss) -> None:
        super().__init__()
        self.words, self.norm, self.inside = nn.Embedding(6, 4), nn.LayerNorm(4), inside

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.words(x[:, :-1]).cumsum(1)) @ self.words.weight.T
        return self.inside(out.flatten(0, 1), x[:, 1:].flatten())


@pytest.mark.parametrize("make", [E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance])
@pytest.mark.parametrize("parts", [1, 2])
def test_first_order_of_parameters_between_the_last_layer_and_the_loss(make: Callable[[], Any], parts: int) -> None:
    """The loss says whose rows are whose; it had been taken for a penalty on these parameters."""
    model, x = bpk.extend(Tied(F.cross_entropy).to(D)), torch.randint(6, (3, 5))
    extension = make()
    with bpk.backpack(extension):
        sum([model(x), 2 * model(x.flip(0))][:parts]).backward()
    rows = []
    for one in zip(x, x.flip(0), strict=True):
        loss = sum([model(one[0][None]), 2 * model(one[1][None])][:parts])
        rows.append(torch.autograd.grad(loss / len(x), list(model.parameters())))
    for p, each in zip(model.parameters(), zip(*rows, strict=True), strict=True):
        grads = torch.stack(each)
        expected = {
            "grad_batch": grads,
            "batch_l2": grads.square().flatten(1).sum(1),
            "sum_grad_squared": grads.square().sum(0),
            "variance": grads.var(0, unbiased=False),
        }[extension.savefield]
        torch.testing.assert_close(getattr(p, extension.savefield), expected)


def test_first_order_of_steps_in_front() -> None:
    """The loss says that samples are along the second axis: fields were those of steps, with a warning."""

    class Steps(nn.Sequential):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(super().forward(x.transpose(0, 1)).permute(1, 2, 0), y)

    x, y = torch.randn(2, 5, 4, dtype=D), torch.randint(3, (2, 5))
    model = bpk.extend(Steps(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(D))
    with bpk.backpack(E.BatchGrad(), E.SumGradSquared()):
        model(x, y).backward()
    weights = list(model.parameters())
    rows = [torch.autograd.grad(model(one[None], label[None]) / 2, weights) for one, label in zip(x, y, strict=True)]
    for p, each in zip(weights, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(each))
        torch.testing.assert_close(p.sum_grad_squared, torch.stack(each).square().sum(0))


def test_first_order_beside_a_penalty_is_refused() -> None:
    model = Tied(F.cross_entropy).to(D)
    model.inside = lambda out, y: F.cross_entropy(out, y) + model.words.weight.square().sum()
    bpk.extend(model)
    with told(RuntimeError), bpk.backpack(E.BatchGrad()):
        model(torch.randint(6, (3, 5))).backward()
