"""What computes graphs of its own works in `torch.inference_mode`, and with tensors that were made there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

QUANTITIES = (E.BatchGrad(), E.KFLR())
LOSS = nn.CrossEntropyLoss()


@contextmanager
def normal() -> Iterator[None]:
    yield


def cost(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    found = bpk.cost(model, LOSS, x, y, *QUANTITIES)
    return [torch.tensor([row.kept for row in found.rows])]


def verified(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    found = bpk.verify(model, LOSS, x, y, *QUANTITIES, raise_on_error=True)
    return [torch.tensor([row.entries for row in found.rows])]


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    found = bpk.accumulate(model, LOSS, [(x[:3], y[:3]), (x[3:], y[3:])], *QUANTITIES, per_sample=True)
    return [found["0.weight"]["grad"], found["0.weight"]["grad_batch"], *found["0.weight"]["kflr"]]


def operator(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    factors = bpk.operators.KFAC(model, LOSS, [(x[:3], y[:3]), (x[3:], y[3:])])
    return [factors @ torch.arange(float(factors.shape[1]))]


@pytest.mark.parametrize("of_data", [False, True], ids=["", "data"])
@pytest.mark.parametrize("compute", [cost, verified, accumulated, operator])
def test_inference_mode(compute: Callable[..., list[Tensor]], of_data: bool) -> None:
    """They were refused there, with reasons that were none of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    expected, context = compute(model, x, y), (normal if of_data else torch.inference_mode)
    if of_data:
        with torch.inference_mode():
            x = x.clone()
    with context():
        found: list[Any] = compute(model, x, y)
    assert not torch.is_inference_mode_enabled()
    for a, b in zip(found, expected, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b)
