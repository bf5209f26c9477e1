"""A call in whose turn there are no samples: an expert to which no token was sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule


class NoRows(Rule):
    """All products are zero; what they are computed with need not take an empty batch. Factors have their usual shapes.

    Args:
        rule: The rule of the layer.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        super().__init__()

    @property
    def name(self) -> str:
        return self.rule.name

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat.new_zeros(len(mat), *call.output.shape)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        rows = (0,) if isinstance(wrt, int) or not sum_batch else ()
        return mat.new_zeros(len(mat), *rows, *call.sample_shape(wrt))

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO

    def squares_of_diagonal(self, call: Call, diag: Tensor, param: str, per_sample: bool = False) -> Tensor:
        return diag.new_zeros(*((0,) if per_sample else ()), *call.params[param].shape)

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        factor = self.rule.kron_input(call, param, approximation)
        return None if factor is None else factor.new_zeros(factor.shape)

    def transposes(self, param: str) -> bool:
        return self.rule.transposes(param)

    def input_first(self, param: str) -> bool:
        return self.rule.input_first(param)

    def swaps_channels(self, param: str) -> bool:
        return self.rule.swaps_channels(param)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        factor = self.rule.kron_input(call, param, approximation)
        width = 1 if factor is None else len(factor)
        return mat.new_zeros(len(mat), 0, call.params[param].numel() // max(1, width))

    def kron_matrix(self, call: Call, rows: Tensor, param: str, outputs: int) -> Tensor:
        return self.rule.kron_matrix(call, rows, param, outputs)


def with_rows(rule: Rule, call: Call) -> Rule:
    """The rule of a call, whose own products may not take an empty batch. (Without inputs, nothing passes the call.)"""
    return rule if not call.inputs or call.inputs[0].shape[0] or isinstance(rule, NoRows) else NoRows(rule)
