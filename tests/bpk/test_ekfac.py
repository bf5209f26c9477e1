"""EKFAC: bases and moments of the same draws, products and inverses, and what is no eigenbasis."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.utils.ekfac import Eigenbasis, ekfac_mat_prod, ekfac_to_mat, inv_ekfac_mat_prod, kfacs_to_ekfac
from bpk.utils.kroneckers import kfacs_to_mat
from tests.bpk.test_weighted_grad import Positions, Reused, tokens
from tests.helpers import backward, data, extended


def test_moments_of_the_draws_of_kfac() -> None:
    """Bases make the factors of KFAC diagonal; moments add up to the trace of the sampled GGN."""
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.EKFAC(3), E.KFAC(3), E.DiagGGNMC(3))
    for p in model.parameters():
        for basis, factor in zip(p.ekfac.bases, p.kfac, strict=True):
            turned = basis.T @ factor @ basis
            torch.testing.assert_close(turned, turned.diagonal().diag())
        torch.testing.assert_close(p.ekfac.moments.sum(), p.diag_ggn_mc.sum())


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("subsampling", [None, [0, 2, 2]])
@pytest.mark.parametrize("name", ["reused", "positions"])
def test_by_definition(name: str, subsampling: list[int] | None) -> None:
    """Also of tied and reused parameters, and of some samples."""
    torch.manual_seed(0)
    if name == "positions" and subsampling is not None:
        pytest.skip("positions are merged with the batch axis")
    model, (x, y) = (Reused(), data()) if name == "reused" else (Positions(), tokens())
    model = model.double()
    found = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.EKFLR(subsampling), E.EKFAC(2, subsampling))
    assert found and not found.wrong


def test_products_and_inverses() -> None:
    torch.manual_seed(0)
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.EKFLR(), E.KFLR())
    for p in model.parameters():
        matrix, columns = ekfac_to_mat(p.ekflr), torch.randn(p.numel(), 2, dtype=p.dtype)
        torch.testing.assert_close(ekfac_mat_prod(p.ekflr)(columns), matrix @ columns)
        damped = matrix + 0.1 * torch.eye(len(matrix), dtype=p.dtype)
        torch.testing.assert_close(
            inv_ekfac_mat_prod(p.ekflr, 0.1)(columns[:, 0]), torch.linalg.solve(damped, columns)[:, 0]
        )
        torch.testing.assert_close(ekfac_to_mat(kfacs_to_ekfac(p.kflr)), kfacs_to_mat(p.kflr))


def test_singular_blocks_need_damping() -> None:
    with pytest.raises(ValueError, match=r"not all positive(?s:.*)Do: "):
        inv_ekfac_mat_prod(Eigenbasis([torch.eye(2)], torch.tensor([1.0, 0.0])))


def test_large_tables_keep_sparse_identities() -> None:
    """The factor of an embedding is diagonal: nothing of the size of the vocabulary squared is made dense."""
    torch.manual_seed(0)
    model, loss_fn = extended(nn.Sequential(nn.Embedding(20_000, 4), nn.Flatten(), nn.Linear(8, 3)).double())
    x, y = torch.randint(20_000, (5, 2)), data()[1]
    backward(model, loss_fn, x, y, E.EKFLR(), E.DiagGGNExact())
    table = model[0].weight
    assert table.ekflr.bases[1].layout is torch.sparse_coo and table.ekflr.moments.shape == (4, 20_000)
    torch.testing.assert_close(table.ekflr.moments.sum(0), table.diag_ggn_exact.sum(1))
    solved = inv_ekfac_mat_prod(table.ekflr, 1.0)(torch.ones(80_000, dtype=torch.float64))
    assert solved.isfinite().all()


def test_bags_of_a_large_vocabulary_are_refused() -> None:
    model, loss_fn = extended(nn.Sequential(nn.EmbeddingBag(20_000, 3, mode="sum")).double())
    with pytest.raises(UnsupportedLayer, match=r"no eigenbasis(?s:.*)Why: (?s:.*)Do: "):
        backward(model, loss_fn, torch.randint(20_000, (5, 2)), data()[1], E.EKFLR())


def test_verify_does_not_compare_directions_without_curvature() -> None:
    """Most inputs' directions have none where samples are few; what is looked at may be rounding alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(60, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(3, 60)
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, torch.arange(3), E.EKFLR(), entries=2).ok
