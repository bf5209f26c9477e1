"""The identity: where what a module returns is marked, so that what lies before it can be found."""

from __future__ import annotations

from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.families.linear_map import ZeroResidual


class Passage(ZeroResidual):
    """The output is the input."""

    reads_values = False

    def acts_on(self, call: Call) -> int | None:
        return 0

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return matrix


PASSAGE = Passage()
