"""`check_rule` finds diagonals of Kronecker factors that are not those of the factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import case
from bpk.jacobians.families.contraction import Contraction


class Linear(Contraction):
    def __init__(self) -> None:
        super().__init__("... i, o i -> ... o", nn.Linear, examples=[case(nn.Linear, 3, 2, shape=(4, 5, 3))])


class OfAllPositions(Linear):
    def kron_input_diagonal(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        return super().kron_input_diagonal(call, param)


class OtherRows(Linear):
    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        return super().kron_rows(call, mat, param, "expand")

    def kron_output(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        rows = super().kron_rows(call, mat, param, approximation).flatten(0, -2)
        return rows.T @ rows


def test_right_ones_pass() -> None:
    assert check_rule(Linear(), dtypes=(torch.float64,)).passed["kron_input_diagonal"] == 3


@pytest.mark.parametrize(
    ("rule", "message"),
    [(OfAllPositions(), r"kron_input_diagonal(.|\n)*kron_input \(expand\)"), (OtherRows(), "kron_rows")],
)
def test_wrong_ones_are_found(rule: Contraction, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        check_rule(rule, dtypes=(torch.float64,))
