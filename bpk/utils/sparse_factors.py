"""Kronecker factors that are sparse matrices with a diagonal alone, such as `A` of an embedding with many words."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.errors import value_error


def sparse_diagonal(values: Tensor) -> Tensor:
    """The sparse matrix with this diagonal."""
    index = torch.arange(len(values), device=values.device).expand(2, -1)
    return torch.sparse_coo_tensor(index, values, [len(values)] * 2, is_coalesced=True, check_invariants=False)


def diagonal(sparse: Tensor) -> Tensor:
    """The diagonal of a sparse matrix that has no other entries."""
    entries = sparse.to_sparse_coo().coalesce()
    row, column = entries.indices()
    if not torch.equal(row, column):
        raise value_error(
            "A sparse Kronecker factor has entries off its diagonal.",
            "only sparse diagonal matrices are inverted without building them densely.",
            "pass factor.to_dense().",
        )
    return entries.values().new_zeros(len(sparse)).index_add(0, row, entries.values())


def is_diagonal(factor: Tensor) -> bool:
    """Whether a factor is a sparse matrix without entries off its diagonal."""
    if factor.layout is torch.strided:
        return False
    row, column = factor.to_sparse_coo().coalesce().indices()
    return torch.equal(row, column)


def dense(factor: Tensor) -> Tensor:
    """A factor as an ordinary tensor."""
    return factor if factor.layout is torch.strided else factor.to_dense()
