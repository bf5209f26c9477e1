"""`x x^T`, of which one triangle is computed where that is faster."""

from __future__ import annotations

import pytest
import torch

from bpk.jacobians.core import gemm


@pytest.mark.parametrize("rows", [1, 90, 130, 400])
@pytest.mark.parametrize("lengths", [(2000,), (2100, 2100), (2100, 2100, 10), (10,), (10, 2100)], ids=str)
def test_sum_of_grams(rows: int, lengths: tuple[int, ...]) -> None:
    """Pieces of any length, of which some are too short for a triangle."""
    torch.manual_seed(0)
    parts = [torch.randn(rows, length).double() for length in lengths]
    whole = torch.cat(parts, 1)
    with torch.no_grad():
        found = gemm.sum_of_grams(iter(parts), rows, whole)
    torch.testing.assert_close(found, whole @ whole.T)


def test_a_triangle_is_computed() -> None:
    """The others would not be tested otherwise."""
    with torch.no_grad():
        assert gemm.triangle_pays(torch.empty(130, 2000)) and gemm.triangle_pays(torch.empty(400, 2100))
    assert not gemm.triangle_pays(torch.empty(400, 2100))  # a graph is built


@pytest.mark.parametrize(("rows", "length"), [(300, 2100), (1200, 30)])
def test_in_spare_memory(rows: int, length: int) -> None:
    """With and without a triangle, and in new memory."""
    torch.manual_seed(0)
    x = torch.randn(length, rows).double()
    spare = torch.full((rows, rows), torch.nan).double()
    with torch.no_grad():
        found, new = gemm.gram(x.T, spare), gemm.gram(x.T)
    assert found is spare
    torch.testing.assert_close(found, x.T @ x)
    torch.testing.assert_close(new, found)


def test_no_matrices() -> None:
    assert torch.equal(gemm.sum_of_grams((), 3, torch.empty(1)), torch.zeros(3, 3))


def test_gradients_of_a_gram() -> None:
    x = torch.randn(300, 2100, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(gemm.gram(x).sum(), x)
    torch.testing.assert_close(found, 2 * x.detach().sum(0).expand_as(x))
