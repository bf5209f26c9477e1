"""Columns for which there is no room wait where a sample has few numbers, added up: the same Hessian diagonals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bpk
from bpk.extensions import BatchDiagHessian, DiagHessian
from bpk.fields.arrived import Columns
from bpk.plan.step import Step
from bpk.sweeps.columns.deposits import Deposits
from bpk.sweeps.columns.merging import Deposit, Merging, added_up, distinct
from bpk.sweeps.columns.run import Run
from tests.bpk.sweeps.test_merged_columns import NETWORKS, N
from tests.helpers import backward
from tests.references.hessian_diagonals import of_samples


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Over how many entries columns have been added up."""
    seen, take = list[int](), Deposits.take

    def noted(self: Deposits, waiting: dict[Step, Columns], *args: object) -> bool:
        found = take(self, waiting, *args)
        if found:
            seen.append(sum(at.call.output[0].numel() for at in waiting))
        return found

    monkeypatch.setattr(Deposits, "take", noted)
    return seen


@pytest.mark.parametrize("always", [False, True], ids=["by cost", "always"])
@pytest.mark.parametrize("name", NETWORKS)
def test_same_diagonals(name: str, always: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if always:
        monkeypatch.setattr(Merging, "is_worth", lambda self, count, size, n, step: True)
        monkeypatch.setattr(Merging, "pays", lambda self, count, size, n, step: False)
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(make().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, *shape, dtype=torch.float64), torch.randint(3, (N,))
    diagonals = of_samples(model, x, y)
    for options in ({"chunk_size": 2}, {"chunk_size": 30}, {"memory": 20_000}):
        backward(model, loss_fn, x, y, DiagHessian(), BatchDiagHessian(), **options)
        for p, diag in zip(model.parameters(), diagonals, strict=True):
            torch.testing.assert_close(p.diag_h_batch, diag)
            torch.testing.assert_close(p.diag_h, diag.sum(0))
    assert taken or not always


def test_columns_do_not_pass_all_layers_again_and_again(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By cost alone: where there is room for a few columns, the first layer sees twice as many as it has entries."""
    counts, visit = dict[int, int](), Run.visit

    def noted(self: Run, step: Step, last: bool = True) -> None:
        counts[step.number] = counts.get(step.number, 0) + (self.count if step in self.waiting else 0)
        visit(self, step, last)

    monkeypatch.setattr(Run, "visit", noted)
    blocks = [nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(6)]
    model, loss_fn = bpk.extend(nn.Sequential(*blocks)), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 5, 4), torch.randint(4, (3, 5))
    loss_fn(model(x).transpose(1, 2), y)
    backward(nn.Sequential(model, Last()), loss_fn, x, y, DiagHessian(), chunk_size=64)
    assert taken and max(taken) == 20
    assert counts[max(counts)] <= 64 + 2 * 20


class Last(nn.Module):
    """Classes are the second axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def test_sums_of_columns_with_other_entries_alike() -> None:
    """Where entries were the same in the columns before, and are not in others, the sum is that of all nevertheless."""
    torch.manual_seed(0)
    runs, whole = [], torch.zeros(2, 6, 6).double()
    for same in ([0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5]):
        mat = torch.randn(9, 2, 6).double()[..., torch.tensor(same)]
        signs = torch.randn(9, 2).double().sign()
        whole += torch.einsum("kn,kni,knj->nij", signs, mat, mat)
        columns = Columns()
        columns.add("a", mat, signs)
        runs.append(columns)
    deposit: Deposit | None = None
    for columns in runs:
        first, same_as = distinct([columns])
        known = None if deposit is None else deposit.refined(same_as)
        deposit = added_up([columns], *((first, same_as) if known is None else (known.first, known.same_as)))
        assert deposit is not None
        deposit.matrix += 0 if known is None else known.matrix
    assert deposit is not None
    found = torch.zeros_like(whole)
    for (mats,), signs in deposit.columns(5):
        found += torch.einsum("kn,kni,knj->nij", signs, mats, mats)
    torch.testing.assert_close(found, whole)


def test_nothing_is_added_up_without_a_limit(taken: list[int]) -> None:
    make, shape = NETWORKS["deep"]
    model, loss_fn = bpk.extend(make()), bpk.extend(nn.CrossEntropyLoss())
    backward(model, loss_fn, torch.randn(N, *shape), torch.randint(3, (N,)), DiagHessian())
    assert not taken
