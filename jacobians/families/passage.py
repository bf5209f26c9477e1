"""The identity: where what a module returns is marked, so that what lies before it can be found."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule


class Passage(Rule):
    """The output is the input."""

    reads_values = False

    def acts_on(self, call: Call) -> int | None:
        return 0

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return matrix


PASSAGE = Passage()
