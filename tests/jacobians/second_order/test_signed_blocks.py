"""Signed columns of matrices that can only be multiplied with: blocks, corners, and large ones without eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bpk.jacobians.second_order.signed_blocks import LARGE, BlockDiagonal, Eigenvectors, Pairs, numbered

N = 2


class Counted:
    """Matrices `[N, D, D]` that count with how many columns they are multiplied."""

    def __init__(self, dense: Tensor) -> None:
        self.dense = (dense + dense.mT) / 2
        self.columns = 0

    def __call__(self, mat: Tensor) -> Tensor:
        self.columns += len(mat)
        return torch.einsum("nij,vnj->vni", self.dense, mat)


def of_sizes(sizes: list[int], order: Tensor) -> Counted:
    """Blocks of these sizes, whose entries are in some order."""
    dense = torch.stack([torch.block_diag(*[torch.randn(s, s).double() for s in sizes]) for _ in range(N)])
    return Counted(dense[:, order][:, :, order])


def check(matrix: Counted, at: Tensor, parts: list[int], chunk: int = 7) -> list[type]:
    """The columns make the matrix, a few at a time; returns what they are made by."""
    like = torch.zeros(N).double()
    found = BlockDiagonal(matrix, at, numbered(parts), like).columns()
    whole = torch.zeros_like(matrix.dense)
    for signed in found:
        for start in range(0, signed.count, chunk):
            columns, signs = signed.columns(start, min(start + chunk, signed.count))
            whole += torch.einsum("kn,kni,knj->nij", signs, columns, columns)
    torch.testing.assert_close(whole, matrix.dense)
    return [type(signed) for signed in found]


@pytest.mark.parametrize("sizes", [[60], [20, 20, 20], [8] * 20, [30, 1, 1, 17, 17], [LARGE + 4] * 2, [300]], ids=str)
def test_blocks_inside_of_a_block(sizes: list[int]) -> None:
    torch.manual_seed(0)
    matrix = of_sizes(sizes, torch.randperm(sum(sizes)))
    kinds = check(matrix, torch.arange(sum(sizes))[None], [sum(sizes)], 1 << 20)
    assert Pairs in kinds if max(sizes) > LARGE else set(kinds) == {Eigenvectors}


def test_one_product_serves_all_blocks() -> None:
    """Four heads of 40 entries: three products to find each, and one for each entry of one."""
    torch.manual_seed(0)
    matrix = of_sizes([40] * 4, torch.arange(160).reshape(40, 4).T.flatten().argsort())
    check(matrix, torch.arange(160)[None], [160])
    assert matrix.columns <= 40 + 4 * 3 + 2


def test_positions_whose_blocks_fall_apart() -> None:
    torch.manual_seed(0)
    matrix = of_sizes([20] * 6, torch.arange(120))
    at = torch.arange(120).reshape(3, 40)  # two blocks at each of three positions
    check(matrix, at, [25, 15])
    assert matrix.columns < 40


@pytest.mark.parametrize("parts", [[3, 50], [50, 3], [30, 2, 40, 3], [4, 40, 90]], ids=str)
def test_a_corner_is_all_that_there_is(parts: list[int]) -> None:
    """Functions linear in each of some parts: as many products as small parts have entries, and twice as many columns.

    The first part is coupled with the second, the third with the last, and small ones with themselves.
    """
    torch.manual_seed(0)
    number, size = numbered(parts), sum(parts)
    pairs = [(k, k + 1) for k in range(0, len(parts) - 1, 2)] + [(k, k) for k, n in enumerate(parts) if n < 5]
    pairs = pairs + [(0, 2)] if len(parts) == 3 else pairs
    mask = torch.zeros(size, size).double()
    for a, b in pairs:
        mask += (number[:, None] == a) & (number == b)
    matrix = Counted(torch.randn(N, size, size).double() * mask)
    like = torch.zeros(N).double()
    found = BlockDiagonal(matrix, torch.arange(size)[None], number, like).columns()
    small = sum(n for n in parts if n < 5)
    assert [signed.count for signed in found] == [2 * small] and matrix.columns <= 1 + len(parts)
    check(matrix, torch.arange(size)[None], parts)


def test_rows_of_zeros_give_no_columns() -> None:
    torch.manual_seed(0)
    matrix = of_sizes([200], torch.arange(200))
    matrix.dense[:, 150:] = 0
    matrix.dense[:, :, 150:] = 0
    (pairs,) = BlockDiagonal(matrix, torch.arange(200)[None], numbered([200]), torch.zeros(N).double()).columns()
    assert pairs.count == 300
    check(matrix, torch.arange(200)[None], [200])


def test_a_broken_sample_leaves_the_other_one_alone() -> None:
    torch.manual_seed(0)
    matrix = of_sizes([200], torch.arange(200))
    matrix.dense[1] = torch.nan
    (signed,) = BlockDiagonal(matrix, torch.arange(200)[None], numbered([200]), torch.zeros(N).double()).columns()
    columns, signs = signed.columns(0, signed.count)
    whole = torch.einsum("kn,kni,knj->nij", signs, columns, columns)
    torch.testing.assert_close(whole[0], matrix.dense[0])
    assert whole[1].isnan().all()


def test_short_formats_are_decomposed_as_a_whole() -> None:
    """Nothing is concluded from products that are rounded to few digits."""
    torch.manual_seed(0)
    matrix = of_sizes([20] * 8, torch.arange(160))
    matrix.dense = matrix.dense.bfloat16()
    like = torch.zeros(N).bfloat16()
    (signed,) = BlockDiagonal(matrix, torch.arange(160)[None], numbered([160]), like).columns()
    assert isinstance(signed, Eigenvectors) and matrix.columns == 160
