"""Inner products of rows that two layers have of one matrix, which one of them sees transposed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bpk
from bpk import extensions as E
from bpk.fields.squares import Squares


class Tied(nn.Module):
    """A table of words, and a last layer with its weight."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(words, width, padding_idx=0), nn.Linear(width, width)
        self.head = nn.Linear(width, words)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(x)).tanh()).transpose(1, 2)


@pytest.mark.parametrize("chosen", [None, [2, 0]])
@pytest.mark.parametrize(
    ("n", "dtype", "error"), [(4, torch.float64, 1e-13), (1, torch.float64, 1e-13), (4, torch.float32, 1e-5)]
)
def test_norms_of_a_tied_table_need_no_rows(
    n: int, dtype: torch.dtype, error: float, chosen: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Tied(50, 40).to(dtype)), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randint(50, (n, 3)), torch.randint(50, (n, 3))
    chosen = chosen if n > 1 else None
    with bpk.backpack(E.BatchGrad(subsampling=chosen)):
        loss_fn(model(x), y).backward()
    expected = model.table.weight.grad_batch.flatten(1).square().sum(1)
    monkeypatch.setattr(Squares, "individual", None)
    with bpk.backpack(E.BatchL2Grad(subsampling=chosen)):
        loss_fn(model(x), y).backward()
    torch.testing.assert_close(model.table.weight.batch_l2, expected, rtol=error, atol=0.0)


def test_rows_that_cancel_are_made() -> None:
    """The gradients of both uses are opposite, so that norms and products tell nothing of their sum."""
    table = nn.Embedding(40, 40).double()
    head = nn.Linear(40, 40, bias=False).double()
    head.weight = table.weight
    sums = bpk.extend(nn.ModuleDict({"table": table, "head": head}))
    loss_fn, eye = bpk.extend(nn.MSELoss(reduction="sum")), torch.eye(40).double()[None]
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        table.weight.copy_(torch.diag(torch.ones(40)))
    with bpk.backpack(E.BatchL2Grad(), E.BatchGrad()):  # the first row, as looked up and as multiplied
        out = sums["table"](token) - sums["head"](eye[:, :1]) * (1 + 1e-12)
        loss_fn(out, torch.ones(1, 1, 40).double()).backward()
    expected = table.weight.grad_batch.flatten(1).square().sum(1)
    torch.testing.assert_close(table.weight.batch_l2, expected, rtol=1e-9, atol=0.0)
