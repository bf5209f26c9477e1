"""Fields of users' extensions that are the gradient, or squares beside it: right, and in memory of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad
from bpk.extensions.firstorder.base import GradientExtension
from bpk.fields.statistics import Uses
from tests.bpk.recording.graph.test_known_gradient import LAYERS, plain_gradients, problem, same


class Summed(GradientExtension):
    """The gradient, and a view of it."""

    field = "summed"

    def __init__(self, needs_gradient: bool) -> None:
        super().__init__()
        self.needs_gradient = needs_gradient

    def value(self, uses: Uses) -> list[Tensor]:
        return [uses.summed(), uses.summed().flatten()]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_fields_do_not_change_with_gradients(name: str, needs_gradient: bool) -> None:
    """As in place by `clip_grad_norm_`, where a user's extension makes nothing else of the sum."""
    model, x, y = problem(name)
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    with bpk.backpack(Summed(needs_gradient)):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    same(model, expected)
    for name, p in model.named_parameters():
        if p.grad is not None:
            p.grad.zero_()
            whole, flat = vars(p)["summed"]
            torch.testing.assert_close(whole, expected[name])
            torch.testing.assert_close(flat, expected[name].flatten())


class SquaresOfSamples(GradientExtension):
    """Squared individual gradients `[N, *p]`."""

    field = "squares"
    needs_samples = True

    def value(self, uses: Uses) -> Tensor:
        return uses.squared_sum(per_sample=True)


@pytest.mark.parametrize("name", LAYERS)
def test_squares_of_samples(name: str) -> None:
    model, x, y = problem(name)
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    with bpk.backpack(SquaresOfSamples(), BatchGrad()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    same(model, expected)
    with bpk.backpack(SquaresOfSamples()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    same(model, expected, 2)
    for p in model.parameters():
        if p.grad is not None:
            torch.testing.assert_close(vars(p)["squares"], vars(p)["grad_batch"].square())
