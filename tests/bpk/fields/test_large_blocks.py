"""Parameters whose blocks, or tables whose factors, are too large to be dense: sparse diagonals stand for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk import preconditioners
from bpk.fields import eigenbasis
from bpk.jacobians.core import room
from bpk.jacobians.families import embedding
from bpk.kernels.posteriors import Kronecker
from bpk.utils.kroneckers import kfacs_to_mat
from bpk.verification import kronecker
from tests.helpers import backward

N = 4


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (room, eigenbasis, kronecker):
        monkeypatch.setattr(module, "WHOLE", 3)
    monkeypatch.setattr(embedding, "DENSE", 3)
    torch.set_default_dtype(torch.float64)


class Normed(nn.Module):
    """A scale with two axes, and a matrix that is multiplied from the right."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm, self.last = nn.Parameter(torch.randn(4, 5)), nn.LayerNorm((5, 1)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm((x @ self.matrix)[..., None])[..., 0].tanh())


def problem() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    return bpk.extend(Normed()), bpk.extend(nn.CrossEntropyLoss()), torch.randn(N, 4), torch.arange(N) % 3


def test_factors_and_their_bases() -> None:
    model, loss_fn, x, y = problem()
    backward(model, loss_fn, x, y, E.KFLR(), E.DiagGGNExact(), E.EKFLR())
    (factor,) = model.norm.weight.kflr
    torch.testing.assert_close(factor.to_dense(), model.norm.weight.diag_ggn_exact.flatten().diag())
    torch.testing.assert_close(model.norm.weight.ekflr.moments, model.norm.weight.diag_ggn_exact.flatten())
    bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.KFLR(), E.EKFLR(), E.EKFAC(2), raise_on_error=True)


def test_predictive_covariance() -> None:
    model, loss_fn, x, y = problem()
    backward(model, loss_fn, x, y, E.KFLR())
    rows, covariance = model(x), torch.zeros(N, 3, 3)
    for p in model.parameters():
        jacobian = [[torch.autograd.grad(z, p, retain_graph=True)[0].flatten() for z in row] for row in rows]
        each = torch.stack([torch.stack(row) for row in jacobian])
        block = kfacs_to_mat([factor.to_dense() for factor in p.kflr])
        covariance += each @ torch.linalg.inv(block + torch.eye(len(block))) @ each.mT
    found = bpk.predictive_covariance(model, x, Kronecker.of(model, "kflr"))
    torch.testing.assert_close(found, covariance)


def test_steps_of_a_preconditioner() -> None:
    model, loss_fn, x, y = problem()
    preconditioner = preconditioners.EKFAC(model, damping=0.1, intervals=(1, 1), mc_samples=None)
    for _ in range(2):  # bases are those of the first step
        model.zero_grad()
        backward(model, loss_fn, x, y, E.DiagGGNExact())
        want = {p: p.grad / (p.diag_ggn_exact + 0.1) for p in model.norm.parameters()}
        model.zero_grad()
        with preconditioner:
            loss_fn(model(x), y).backward()
        preconditioner.step()
        for p, expected in want.items():
            torch.testing.assert_close(p.grad, expected)


def test_sums_over_batches() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 3))
    x, y = torch.tensor([[0, 1], [1, 2], [5, 5], [6, 0]]), torch.arange(N) % 3
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), [(x[:1], y[:1]), (x[1:], y[1:])], E.KFLR())
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.KFLR())
    expected = model[0].weight.kflr
    for mine, other in zip(found["0.weight"]["kflr"], expected, strict=True):
        assert mine.layout is other.layout
        torch.testing.assert_close(mine.to_dense(), other.to_dense())
