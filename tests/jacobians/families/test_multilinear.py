"""Patterns of the family `Multilinear`: any number of axes, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families.multilinear import Multilinear
from tests.helpers import registered


class Mixed(nn.Module):
    """An einsum with a weight, plus a bias of the output's features if asked."""

    def __init__(self, equation: str, *shape: int, bias: int = 0) -> None:
        super().__init__()
        self.equation = equation
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(bias)) if bias else None

    def forward(self, *x: Tensor) -> Tensor:
        out = torch.einsum(self.equation, *x, self.weight)
        return out if self.bias is None else out + self.bias


def each(equation: str, weight: tuple[int, ...], *shapes: Any, bias: int = 0) -> list[Example]:
    return [case(Mixed, equation, *weight, bias=bias, shapes=given) for given in shapes]


LINEAR = [((4, 3),), ((4, 5, 3),), ((4, 2, 5, 3),)]


@pytest.mark.parametrize(
    ("pattern", "bias", "examples"),
    [
        ("... i, o i -> ... o", "bias", each("...i,oi->...o", (2, 3), *LINEAR, bias=2)),
        ("n ... i, o i -> n ... o", "bias", each("...i,oi->...o", (2, 3), *LINEAR, bias=2)),
        ("n ..., ... -> n ...", None, each("nab,ab->nab", (3, 2), ((4, 3, 2),)) + each("na,a->na", (3,), ((4, 3),))),
        (
            "n ... i, o i -> n o",
            None,
            each("ntui,oi->no", (2, 3), ((4, 5, 2, 3),)) + each("ni,oi->no", (2, 3), ((4, 3),)),
        ),
        ("... i, ... j, i j -> ...", None, each("...i,...j,ij->...", (3, 2), ((4, 3), (4, 2)), ((4, 5, 3), (4, 5, 2)))),
    ],
)
def test_any_number_of_axes(pattern: str, bias: str | None, examples: list[Example]) -> None:
    rule = Multilinear(pattern, Mixed, params=("weight",), bias=bias, examples=examples)
    assert check_rule(rule, dtypes=(torch.float64,)).checks > 50


def test_a_pattern_that_begins_with_dots_leaves_the_batch_axis_where_it_is() -> None:
    rule = Multilinear("... i, o i -> ... o", Mixed, params=("weight",))
    torch.manual_seed(0)

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = Mixed("...i,oi->...o", 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixed(x.transpose(0, 1)).transpose(0, 1).flatten(0, 1)  # type: ignore[no-any-return]

    model, x, y = TimeFirst(), torch.randn(3, 5, 3), torch.randint(2, (15,))
    with registered(rule):
        result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagHessian(), E.KFLR())
    assert result and result.summary() == "3 ok", result


@pytest.mark.parametrize(
    ("pattern", "shapes", "why"),
    [
        (
            "n t i, i o -> n t o",
            ((4, 5, 3), (2, 3)),
            "the axis 'i' is 3 long in input 0 and 2 long in parameter 'weight'",
        ),
        ("n i, o i -> n o", ((4, 5, 3), (2, 3)), "input 0 has 3 axes, and in the pattern 2 axes"),
        ("... i, o i -> ... o", ((3,), (2, 3)), "input 0 has 1 axis, and in the pattern 2 axes"),
        ("n ..., ... -> n ...", ((3, 4, 5), (4,)), "parameter 'weight' has 1 axis, and in the pattern 2 axes"),
        ("n i, n i, o i -> n o", ((4, 3), (2, 3)), "the pattern has 3 operands, the layer 2"),
    ],
)
def test_what_does_not_fit_is_named(pattern: str, shapes: Any, why: str) -> None:
    rule = Multilinear(pattern, Mixed, params=("weight",))
    *inputs, weight = map(torch.randn, shapes)
    with pytest.raises(RuleError, match=f"does not fit operands of shapes (?s:.*)Why: {why}"):
        rule.forward(None, inputs, {"weight": weight})


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("n.. i, o i -> n.. o", "'n..' is no name of an axis"),
        ("n ... ..., o -> n", "repeats an axis"),
        ("... i, ... o i -> ... o", "a parameter has the batch axis '...'"),
    ],
)
def test_dots_that_mean_nothing_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(RuleError, match=f"is not a multilinear pattern(?s:.*){why}"):
        Multilinear(pattern, Mixed, params=("weight",))
