"""An embedding tied to the output layer of a language model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.fields.nearest_kronecker import nearest_kronecker

VOCAB, WIDTH, N, T = 5, 3, 4, 3


class Tied(nn.Module):
    """Embedding, a nonlinearity, and a linear layer with the same weight; predictions `[N, vocab, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(x)))).mT


def run(*extensions: E.BackpropExtension) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Tied().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randint(VOCAB, (N, T)), torch.randint(VOCAB, (N, T))
    with bpk.backpack(*extensions):
        loss_fn(model(x), y).backward()
    return model, x, y


def test_quantities_with_cross_terms() -> None:
    model, x, y = run(E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.DiagHessian(), E.GGNMP(), E.HMP())
    p, loss_fn = model.embedding.weight, nn.CrossEntropyLoss()
    rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / N, p)[0] for n in range(N)]
    torch.testing.assert_close(p.grad_batch, torch.stack(rows))
    torch.testing.assert_close(p.variance, torch.stack(rows).var(0, correction=0))
    unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
    torch.testing.assert_close(p.diag_ggn_exact.flatten(), p.ggnmp(unit).flatten(1).diagonal())
    torch.testing.assert_close(p.diag_h.flatten(), p.hmp(unit).flatten(1).diagonal())
    gradient = torch.autograd.grad(loss_fn(model(x), y), p, create_graph=True)[0].flatten()
    hessian = torch.stack([torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in gradient])
    torch.testing.assert_close(p.diag_h.flatten(), hessian.diagonal())


@pytest.mark.parametrize("extension", [E.KFLR, E.KFAC, E.KFRA])
def test_kronecker_factors_of_both_orientations(extension: type[E.BackpropExtension]) -> None:
    model, *_ = run(extension())
    rows, columns = getattr(model.embedding.weight, extension().savefield)
    sizes = sorted((rows.shape[0], columns.shape[0]))
    assert sizes == [WIDTH, VOCAB]
    for factor in (rows, columns):
        assert torch.linalg.eigvalsh(factor).min() > -1e-12


def test_nearest_kronecker_product() -> None:
    """Against the singular value decomposition of the rearranged sum, also where a Gram matrix is (nearly) singular."""
    torch.manual_seed(0)
    g1, a1, g2, a2 = (g @ g.T for g in (torch.randn(k, k, dtype=torch.float64) for k in (3, 2, 3, 2)))
    for terms in (
        [[g1, a1], [g2, a2]],
        [[g1, a1], [2 * g1, a2]],
        [[g1, a1], [g2, a1 / 3]],
        [[g1, a1], [g1, a1]],
        [[g1, a1], [g1 * (1 + 1e-9), a2]],
        [[0 * g1, a1], [g2, a2]],
        [[g1, 0 * a1], [g2, a2]],
        [[g1, 0 * a1], [g2, 0 * a2]],
        [[1e-12 * g1, 1e12 * a1], [1e6 * g2, 1e-6 * a2]],
    ):
        u, s, v = torch.linalg.svd(sum(torch.outer(g.flatten(), a.flatten()) for g, a in terms))
        left, right = nearest_kronecker(terms)
        best = s[0] * torch.outer(u[:, 0], v[0])
        torch.testing.assert_close(torch.outer(left.flatten(), right.flatten()), best)
        assert all(torch.linalg.eigvalsh(x).amin() >= -1e-12 * x.norm() for x in (left, right))
    left, right = nearest_kronecker([[g1, a1], [g2, a2]])
    coefficients = torch.linalg.lstsq(torch.stack([g1.flatten(), g2.flatten()], 1), left.flatten()[:, None]).solution
    torch.testing.assert_close(coefficients[0, 0], coefficients.new_ones(()))
