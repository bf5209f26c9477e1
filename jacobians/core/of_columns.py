"""What several parameters of a call make of the same columns, one after the other, is computed once."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from bpk.jacobians.core.numeric import is_differentiated


class OfColumns:
    """The last result of one kind: kept as long as columns, result and `which` (an object) are the same."""

    kept: tuple[weakref.ref[Tensor], object, tuple[int, int], Tensor] | None = None

    def get(self, mat: Tensor, which: object, compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """`compute()`, and whether it was known. Where it must be differentiable, nothing is kept."""
        if is_differentiated():
            return compute(), False
        if self.kept is not None:
            of, known, versions, found = self.kept
            if of() is mat and known is which and versions == (mat._version, found._version):
                return found, True
        found = compute()
        self.kept = weakref.ref(mat), which, (mat._version, found._version), found
        return found, False
