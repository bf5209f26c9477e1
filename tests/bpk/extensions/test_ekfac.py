"""EKFAC: bases and moments of the same draws, of a data set, products and inverses, and what is no eigenbasis."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bpk
from bpk import extensions as E
from bpk.fields import eigenbasis
from bpk.jacobians.core import numeric
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.norms import projected_squares
from bpk.kernels import Eigenbases
from bpk.utils.ekfac import Eigenbasis, bases_of, ekfac_mat_prod, ekfac_to_mat, inv_ekfac_mat_prod, kfacs_to_ekfac
from bpk.utils.kroneckers import kfacs_to_mat
from tests.bpk.extensions.test_weighted_grad import Positions, Reused, tokens
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


def test_the_factor_of_weight_and_bias_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(matrix))
        return eigh(matrix)

    monkeypatch.setattr(eigenbasis, "eigh", counted)
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    backward(model, loss_fn, x, y, E.EKFLR(), E.KFLR())
    assert sorted(sizes) == [3, 4, 5, 5]
    for layer in (model[0], model[2]):
        (basis,), (other, _) = layer.bias.ekflr.bases, layer.weight.ekflr.bases
        assert torch.equal(basis, other) and basis.data_ptr() != other.data_ptr()
        turned = basis.T @ layer.bias.kflr[0] @ basis
        torch.testing.assert_close(turned, layer.bias.ekflr.moments.diag())


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("given", [(True, True), (False, True), (True, False)])
def test_projected_squares(positions: int, given: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in several blocks, and so few numbers at a time that samples are taken one by one."""
    monkeypatch.setattr(numeric, "CACHE", 8)
    torch.manual_seed(0)
    a = torch.randn(5, 1, 4, positions, dtype=torch.float64)
    blocks = [torch.randn(v, 5, 1, 2, positions, dtype=torch.float64) for v in (1, 3)]
    bases = (torch.randn(n, n, dtype=torch.float64) for n in (2, 4))
    left, right = (basis if some else None for basis, some in zip(bases, given, strict=True))
    found = projected_squares(lambda samples: a[samples], blocks, 4, left, right)
    rows = torch.einsum("vngot,ngit->vnoi", torch.cat(blocks), a)
    rows = rows if left is None else left.T @ rows
    rows = rows if right is None else rows @ right
    torch.testing.assert_close(found, rows.square().sum((0, 1)))


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


class Tied(nn.Module):
    """A table tied to the last layer, a layer that is called twice, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.twice = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.conv, self.last = nn.ConvTranspose1d(4, 1, 2), nn.Linear(4, 5)
        self.last.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        h = self.norm(self.twice(h).tanh() + self.twice(h))
        out: torch.Tensor = self.last(self.conv(h.transpose(1, 2)).flatten(1))
        return out


def data_set() -> tuple[nn.Module, nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model, a loss that ignores a target, and batches of unequal size."""
    torch.manual_seed(0)
    x, y = torch.randint(5, (11, 3)), torch.randint(5, (11,))
    y[3] = -100
    return Tied().double(), nn.CrossEntropyLoss(), list(zip(x.split((4, 2, 5)), y.split((4, 2, 5)), strict=True))


def assert_alike(found: Eigenbasis, expected: Eigenbasis) -> None:
    """The same matrix."""
    matrices = [ekfac_to_mat(Eigenbasis([b.to_dense() for b in e.bases], e.moments)) for e in (found, expected)]
    torch.testing.assert_close(*matrices, rtol=1e-9, atol=1e-12)


def test_of_a_data_set(tmp_path: Path) -> None:
    """Factors first, then moments in their bases: what one large batch has."""
    model, loss_fn, batches = data_set()
    factors = bpk.accumulate(model, loss_fn, batches, E.KFLR()).field("kflr")
    found = bpk.accumulate(model, loss_fn, batches, E.EKFLR(bases=bases_of(model, factors)))
    whole, loss_fn = bpk.extend(model), bpk.extend(loss_fn)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    backward(whole, loss_fn, x, y, E.EKFLR(), E.DiagGGNExact())
    for name, p in whole.named_parameters():
        assert_alike(found[name]["ekflr"], p.ekflr)
        torch.testing.assert_close(found[name]["ekflr"].moments.sum(), p.diag_ggn_exact.sum())
    found.save(tmp_path / "ekflr.safetensors")
    again = bpk.Accumulated.load(tmp_path / "ekflr.safetensors")
    assert all(torch.equal(again[n]["ekflr"].moments, found[n]["ekflr"].moments.cpu()) for n in found)
    assert "Eigenbasis" in str(again) and again.plot() is not None


def test_draws_and_samples_in_given_bases() -> None:
    """The moments of drawn columns, and of some samples, are theirs in these bases."""
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.KFLR())
    bases, some = bases_of(model, {n: p.kflr for n, p in model.named_parameters()}), [0, 2]
    extensions = E.EKFAC(2, bases=bases), E.EKFLR(some, bases), E.SqrtGGNMC(2), E.SqrtGGNExact(some)
    backward(model, loss_fn, *data(), *extensions)
    for p in model.parameters():
        for ekfac, rows in ((p.ekfac, p.sqrt_ggn_mc), (p.ekflr, p.sqrt_ggn_exact)):
            turned = rows.flatten(2) @ kfacs_to_mat(ekfac.bases)
            torch.testing.assert_close(ekfac.moments.flatten(), turned.square().sum((0, 1)))
            assert all(torch.equal(mine, given) for mine, given in zip(ekfac.bases, bases[p], strict=True))


def test_bases_of_another_model_are_refused() -> None:
    model, loss_fn = extended()
    for bases in ({}, {p: [torch.eye(2)] for p in model.parameters()}):
        with pytest.raises(UnsupportedLayer, match=r"no bases for a parameter \[(?s:.*)Do:  pass bases="):
            backward(model, loss_fn, *data(), E.EKFLR(bases=bases))
    with pytest.raises(ValueError, match=r"given for 0.weigth(?s:.*)Do:  pass factors by the names"):
        bases_of(model, {"0.weigth": [torch.eye(3)]})


def test_a_checkpoint_knows_the_bases(tmp_path: Path) -> None:
    """Moments in other bases do not add up to those that are there."""
    model, loss_fn, batches = data_set()
    factors = bpk.accumulate(model, loss_fn, batches, E.KFLR()).field("kflr")
    bases, options = bases_of(model, factors), {"checkpoint": tmp_path / "ekflr.ckpt"}
    first = bpk.accumulate(model, loss_fn, batches, E.EKFLR(bases=bases), **options)
    again = bpk.accumulate(model, loss_fn, batches, E.EKFLR(bases=bases), **options)
    assert all(torch.equal(first[n]["ekflr"].moments, again[n]["ekflr"].moments) for n in first)
    turned = {p: [basis.flip(1) for basis in mine] for p, mine in bases.items()}
    with pytest.raises(ValueError, match="belongs to another run: extension ekflr differs"):
        bpk.accumulate(model, loss_fn, batches, E.EKFLR(bases=turned), **options)


def test_large_tables_of_a_data_set() -> None:
    """Nothing of the size of the vocabulary squared is made dense on the way, either."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    batches = [(torch.randint(20_000, (5, 2)), data()[1]) for _ in range(2)]
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.KFLR(), E.DiagGGNExact())
    bases = bases_of(model, found.field("kflr"))
    assert bases[model[0].weight][1].layout is torch.sparse_coo
    moments = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.EKFLR(bases=bases))["0.weight"]["ekflr"].moments
    torch.testing.assert_close(moments.sum(0), found["0.weight"]["diag_ggn_exact"].sum(1))


def test_as_a_posterior() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.EKFLR())
    x, named = data()[0], dict(model.named_parameters())
    posterior = Eigenbases.of({name: p.ekflr for name, p in named.items()}, prior_precision=0.3, scale=5.0)
    found = bpk.predictive_covariance(model, x, posterior)
    expected = torch.zeros_like(found)
    for p in named.values():
        out = model(x)
        rows = [torch.autograd.grad(out[n, c], p, retain_graph=True)[0].flatten() for n, c in every(out)]
        jacobian = torch.stack(rows).view(*out.shape, -1)
        precision = 5.0 * ekfac_to_mat(p.ekflr) + 0.3 * torch.eye(p.numel(), dtype=p.dtype)
        expected += jacobian @ torch.linalg.inv(precision) @ jacobian.mT
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="that of another model, or of another parameter"):
        bpk.predictive_covariance(model, x, Eigenbases.of({next(iter(named)): list(named.values())[-1].ekflr}))


def every(out: torch.Tensor) -> list[tuple[int, int]]:
    """The places of all entries."""
    return [(n, c) for n in range(out.shape[0]) for c in range(out.shape[1])]
