"""Products that are taken in pieces, or handed to another library, where they are large: the same numbers."""

from __future__ import annotations

import pytest
import torch

from bpk.jacobians.core import numeric


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORTH_ONEDNN", "WORTH_TURNING", "ONE_BY_ONE", "LARGE"):
        monkeypatch.setattr(numeric, name, 0)
    monkeypatch.setattr(numeric, "has_wide_vectors", lambda: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_products(dtype: torch.dtype) -> None:
    x, y = torch.randn(3, 4, 6, dtype=dtype), torch.randn(3, 5, 6, dtype=dtype)
    gaps = torch.randn(5, 12, dtype=dtype)[:, ::2]
    torch.testing.assert_close(numeric.linear(x, gaps), x @ gaps.T)
    for some in (1, 3):
        expected = x[:some] @ y[:some].mT
        torch.testing.assert_close(numeric.products(x[:some], y[:some]), expected)
        out = torch.empty_like(expected)
        assert numeric.products(x[:some], y[:some], out) is out
        torch.testing.assert_close(out, expected)


@torch.no_grad()
def test_onednn_multiplies_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3)
    for wide in (True, False):
        monkeypatch.setattr(numeric, "has_wide_vectors", lambda wide=wide: wide)
        assert numeric.takes_onednn(x) is (wide and numeric.can_take_onednn(x))


def test_products_are_differentiated_where_logarithms_of_a_gradient_have_derivatives() -> None:
    """Torch's gradient of logcumsumexp is made of logarithms of what arrives."""
    x, at = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), numeric.placeholder(torch.zeros(2, 3).double())
    pulled = torch.autograd.grad(x.logcumsumexp(1), x, at, create_graph=True)[0]
    jacobian = torch.autograd.functional.jacobian(lambda x: x.logcumsumexp(1), x)
    (found,) = torch.autograd.grad(pulled, at, torch.ones_like(x))
    torch.testing.assert_close(found, jacobian.sum((2, 3)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_squares(dtype: torch.dtype, weighted: bool) -> None:
    m, weights = torch.randn(3, 2, 4, 5, dtype=dtype), torch.randn(3, 2, dtype=dtype) if weighted else None
    squares = numeric.wide(m).square() * (1 if weights is None else numeric.wide(weights)[..., None, None])
    torch.testing.assert_close(numeric.sum_of_squares(m, weights), squares.sum(0))


@pytest.mark.parametrize("entry", [1.0, torch.finfo(torch.float32).max, torch.inf, -torch.inf, torch.nan])
def test_numbers_are_finite(entry: float) -> None:
    """Also where their sum is not; and infinities of both signs do not hide in it."""
    x = torch.tensor([[entry, entry], [2.0, entry]])
    assert numeric.is_finite(x) is bool(x.isfinite().all())
    both = torch.tensor([entry, -entry])
    assert numeric.is_finite(both) is bool(both.isfinite().all())


@pytest.mark.parametrize("columns", [0, 1, numeric.FEW_COLUMNS, numeric.FEW_COLUMNS + 1])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_matrix_times_many(columns: int, groups: int) -> None:
    """Few columns go another way than many; both have derivatives."""
    torch.manual_seed(0)
    matrix = torch.randn(2, groups, 4, 5, dtype=torch.float64, requires_grad=True)
    many = torch.randn(6, groups, 5, columns, dtype=torch.float64, requires_grad=True)
    found = numeric.times_each(matrix, many)
    assert found.shape == (2, 6, groups, 4, columns)
    for v in range(2):
        for n in range(6):
            torch.testing.assert_close(found[v, n], matrix[v] @ many[n])
    ours = torch.autograd.grad(found.sin().sum(), [matrix, many])
    theirs = torch.autograd.grad((matrix[:, None] @ many).sin().sum(), [matrix, many])
    torch.testing.assert_close(ours, theirs)
