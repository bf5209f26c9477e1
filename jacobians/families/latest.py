"""What was computed from the columns that came last, for those who ask with the same columns again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bpk.jacobians.core.engine import is_transformed

T = TypeVar("T")


class Latest(Generic[T]):
    """Results by columns, at most `limit` numbers of them (but always those of the last).

    Columns are held, so that their memory stays theirs; the same columns are a view of the same memory, unchanged.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, int, bool, int, T]] = []

    def find(self, mat: Tensor, compute: Callable[[], T], size: Callable[[T], int], limit: int) -> T:
        """`compute()`, evaluated once for these columns; what it finds has `size` numbers."""
        if mat.requires_grad or is_transformed():
            return compute()
        for columns, version, graph, _, found in self.kept:
            if columns.is_set_to(mat) and (version, graph) == (mat._version, torch.is_grad_enabled()):
                return found
        found = compute()
        self.kept.append((mat, mat._version, torch.is_grad_enabled(), size(found), found))
        while len(self.kept) > 1 and sum(entry[3] for entry in self.kept) > limit:
            del self.kept[0]
        return found
