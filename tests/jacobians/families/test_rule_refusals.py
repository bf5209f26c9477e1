"""Rules that say too little, or what cannot be: refused, with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.contraction import Contraction
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.families.linear_map import ZeroResidual
from bpk.jacobians.families.multilinear import Multilinear

MANY = " ".join(f"a{k}" for k in range(60))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Contraction("n i, o i -> n o", nn.Linear), r"not the pattern of a linear layer(?s:.*)'\.\.\. i, o i"),
        (lambda: Contraction("... i, o i -> ... i", nn.Linear), "the weight has all of these"),
        (lambda: Multilinear("n i -> n i", nn.Linear, params=("a", "b")), "at least one must be an input"),
        (lambda: Multilinear(f"n {MANY} -> n", nn.Linear), "it has 61 axes"),
        (lambda: Elementwise("x"), "nothing leads to it(?s:.*)Do:  name a class"),
        (
            lambda: Elementwise({"tanh": "x"}, nn.GELU, choose="approximate").derivation(nn.GELU()),
            "no expression for approximate='none'(?s:.*)known are 'tanh'",
        ),
        (lambda: Elementwise("x % 2", nn.ReLU).derivation(nn.ReLU()), "cannot be written as torch code(?s:.*)sigmoid"),
    ],
    ids=["no dots", "weight", "no input", "axes", "nothing", "choice", "code"],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        make()


class Undeclared(ZeroResidual):
    """Declares structure, and not what goes with it."""

    knows_diagonals = True

    def residual(self, call: Call, wrts: Any = (0,)) -> Residual:
        return Residual.DIAGONAL

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Any = 0) -> Tensor:
        return mat

    jac_t_mat_prod = jac_mat_prod  # type: ignore[assignment]


def test_what_was_declared_must_be_given() -> None:
    rule, x = Undeclared(nn.Identity), torch.ones(1, 2)
    call = Call.of(nn.Identity(), x, rule=rule)
    with pytest.raises(TypeError, match="declares a diagonal residual but does not give it"):
        rule.residual_mat_prod(call, x, {0: x[None]})
    with pytest.raises(TypeError, match="needs columns"):
        rule.squares_of_diagonal(call, x, "weight")


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_slips_in_a_declaration_are_named() -> None:
    """An object in the place of its class, a string in the place of names, one example in the place of several."""
    with pytest.raises(RuleError, match="which is no class"):
        bpk.Autodiff(Doubled())  # type: ignore[arg-type]
    with pytest.raises(RuleError, match=r"write params=\('weight',\)"):
        bpk.Autodiff(Doubled, params="weight")
    with pytest.raises(RuleError, match=r"write examples=\[case"):
        bpk.Autodiff(Doubled, examples=case(Doubled, shape=(4, 3)))  # type: ignore[arg-type]
