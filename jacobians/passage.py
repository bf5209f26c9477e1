"""The identity of several tensors: where what a module returns is marked, so that what lies before it can be found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bpk.jacobians.call import Call, Options, Wrt
from bpk.jacobians.rule import Residual
from bpk.jacobians.several import SeveralOutputs


class Passage(SeveralOutputs):
    """Result `k` is input `k`."""

    reads_values = False

    def results(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Sequence[Tensor]:
        return inputs

    def acts_on(self, call: Call) -> int | None:
        return 0

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        zeros = {k: mat.new_zeros(*mat.shape[:2], *shape) for k, shape in call.used.items() if k != wrt}
        return self.merge(call, zeros | {int(wrt): mat} if wrt in call.used else zeros)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        parts = self.split(call, mat)
        if wrt in parts:
            return parts[wrt]
        return mat.new_zeros(len(mat), *call.shape_of(wrt))  # a result that nothing uses may have other rows

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return matrix if len(call.used) == 1 else super().congruence(call, matrix, wrt)


PASSAGE = Passage()
