"""Models that put samples in another order, and give a loss several rows of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped": lambda h: h.flip(0),
    "rolled": lambda h: torch.roll(h, 1, 0),
    "shuffled": lambda h: h[torch.tensor([2, 0, 1])],
}


class Reordering(nn.Module):
    """A layer for each step of sequences; the head sees samples in another order."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.order = nn.Linear(2, 4), nn.Linear(4, 3), order

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.order(self.first(x).tanh()))
        return out


@pytest.mark.parametrize("steps", [2, 3, 4, 6])
@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_samples_are_numbered_as_in_the_data(name: str, steps_first: bool, steps: int) -> None:
    """Those of the first axis of what the model was given, not its steps, or rows of the loss."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Reordering(ORDERS[name]).double()), bpk.extend(nn.CrossEntropyLoss())
    order = ORDERS[name](torch.arange(3))
    for _ in range(2):
        x, y = torch.randn(3, steps, 2).double(), torch.randint(3, (3, steps))
        targets = y.transpose(0, 1) if steps_first else y
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            out = model(x)
            loss_fn((out.transpose(0, 1) if steps_first else out).reshape(-1, 3), targets.flatten()).backward()
        losses = nn.functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none").sum(1) / y.numel()
        for p in model.parameters():
            rows = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            expected = torch.zeros_like(rows)
            expected[order] = rows
            torch.testing.assert_close(p.grad_batch, expected)


def test_one_row_for_each_sample_is_in_the_order_of_the_loss() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Reordering(ORDERS["shuffled"]).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 2, 2).double(), torch.randint(3, (3,))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x).mean(1), y).backward()
    losses = nn.functional.cross_entropy(model(x).mean(1), y, reduction="none") / 3
    expected = torch.stack([torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0] for loss in losses])
    torch.testing.assert_close(model.first.weight.grad_batch, expected)


class Repeating(nn.Module):
    """Draws `[K N]` of rows of data, in front of all layers."""

    def __init__(self, width: int, times: int, words: bool) -> None:
        super().__init__()
        self.first, self.last, self.times = nn.Linear(width, 4), nn.Linear(4, 3), times
        self.table = nn.Embedding(5, width) if words else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(self.times, 1)
        out: Tensor = self.last(self.first(x if self.table is None else self.table(x).sum(1)).tanh())
        return out


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(("width", "times"), [(3, 2), (3, 3), (5, 5)])
def test_who_repeats_rows_is_told_also_where_these_are_as_many_as_two_axes_have(
    width: int, times: int, words: bool
) -> None:
    model, loss_fn = bpk.extend(Repeating(width, times, words)), bpk.extend(nn.CrossEntropyLoss())
    x = torch.randint(5, (4, width)) if words else torch.randn(4, width)
    told = f"of the {4 * times} rows of .* each {times} in a row"
    with pytest.warns(UserWarning, match=told), bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), torch.randint(3, (4 * times,))).backward()
