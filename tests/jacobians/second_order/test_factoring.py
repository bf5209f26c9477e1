"""Dense second derivatives that fall into blocks, or have rows of zeros, are decomposed block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bpk.jacobians.core import eigendecomposition
from bpk.jacobians.second_order import factoring
from bpk.jacobians.second_order.factoring import factor
from bpk.jacobians.second_order.structure import components

N = 3


def blocks(sizes: list[int], zeros: int) -> Tensor:
    """Symmetric matrices `[N, D, D]` with blocks of these sizes and rows of zeros, in random order."""
    torch.manual_seed(0)
    each = [torch.block_diag(*[x @ x.T * s for s in sizes if len(x := torch.randn(s, s))]) for _ in range(N)]
    dense = torch.stack(each).double() - 2 * torch.eye(sum(sizes)).double()
    wide = torch.nn.functional.pad(dense, (0, zeros, 0, zeros))
    order = torch.randperm(wide.shape[1])
    return wide[:, order][:, :, order]


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of matrices that are decomposed."""
    found: list[int] = []

    def counted(matrices: Tensor) -> tuple[Tensor, Tensor]:
        found.append(matrices.shape[-1])
        return eigendecomposition.eigh(matrices)

    monkeypatch.setattr(factoring, "eigh", counted)
    return found


@torch.no_grad()
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("sizes", [[60], [20, 20, 20], [1] * 60, [30, 1, 1, 17, 17]], ids=str)
@pytest.mark.parametrize("zeros", [0, 40])
def test_columns_of_blocks_are_those_of_the_matrix(
    sizes: list[int], zeros: int, balanced: bool, decomposed: list[int]
) -> None:
    dense = blocks(sizes, zeros)
    columns, signs = factor(dense, balanced)
    torch.testing.assert_close(torch.einsum("kn,kni,knj->nij", signs, columns, columns), dense)
    assert len(columns) <= sum(sizes) and sorted(decomposed) == sorted(set(sizes))


@torch.no_grad()
def test_what_is_small_in_single_precision_is_no_rounding() -> None:
    """Eigenvalues of 1e-5 times the largest one: as many columns as there are of them, and nothing is lost."""
    basis = torch.linalg.qr(torch.randn(N, 64, 64, dtype=torch.float64)).Q
    sizes = torch.cat([torch.ones(1), 1e-5 * torch.linspace(-1.0, 1.0, 20), torch.zeros(43)]).double()
    dense = basis * sizes @ basis.mT
    columns, signs = factor(dense.float())
    assert len(columns) == 21
    whole = torch.einsum("kn,kni,knj->nij", signs.double(), columns.double(), columns.double())
    torch.testing.assert_close(whole, dense, rtol=0.0, atol=3e-7)


@torch.no_grad()
def test_a_sample_alone_may_join_blocks_or_be_broken() -> None:
    dense = blocks([30, 30], 0)
    dense[1] = blocks([60], 0)[1]
    dense[2] = torch.nan
    columns, signs = factor(dense)
    whole = torch.einsum("kn,kni,knj->nij", signs, columns, columns)
    torch.testing.assert_close(whole[:2], dense[:2])
    assert whole[2].isnan().all()


def test_components_are_found_along_chains() -> None:
    joined = torch.zeros(7, 7, dtype=torch.bool)
    for a, b in ((0, 6), (6, 3), (3, 5), (1, 4)):
        joined[a, b] = joined[b, a] = True
    assert [found.tolist() for found in components(joined)] == [[[2]], [[1, 4]], [[0, 3, 5, 6]]]
