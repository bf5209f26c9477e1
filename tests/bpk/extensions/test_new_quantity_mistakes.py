"""Mistakes in a quantity of one's own are told by its name, before anything is overwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.secondorder.base import SquareRootExtension
from bpk.fields.statistics import Uses
from tests.helpers import backward, data, extended


class NoField(GradientExtension):
    def value(self, uses: Uses) -> Tensor:
        return uses.summed()


class InPlaceOfGrad(NoField):
    field = "grad"


class OwnInit(NoField):
    field = "own"

    def __init__(self, power: int) -> None:
        self.power_of = power


class NoValue(GradientExtension):
    field = "nothing"


class NoCombine(SquareRootExtension):
    field = "apart"
    combines = True

    def value(self, uses: Uses) -> Tensor:
        return uses.squared_sum()


class NoForm(NoField):
    field = "formless"

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.gradients.sum(0)


class WrongForm(NoField):
    field = "wrong"
    form = Form.BATCH

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.gradients


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoField, r"NoField has no field(?s:.*)declare field ="),
        (InPlaceOfGrad, "InPlaceOfGrad saves its values in 'grad', which every tensor has"),
        (lambda: E.HMP(savefield="data"), "HMP saves its values in 'data'"),
        (lambda: OwnInit(2), r"OwnInit has no savefield(?s:.*)super\(\).__init__\(\)"),
        (NoValue, r"NoValue declares a sweep but no value: write a method value"),
        (NoCombine, r"NoCombine does not combine values: write a method combine"),
    ],
)
def test_in_a_pass(make: Callable[[], BackpropExtension], message: str) -> None:
    model, loss_fn = extended()
    x, y = data()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError), match=message), bpk.backpack(make(), chunk_size=1):
        loss_fn(model(x), y).backward()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    backward(model, loss_fn, x, y, E.BatchGrad())


def test_a_definition_without_a_form() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=r"NoForm has a definition and does not say what form(?s:.*)Form\.BATCH"):
        bpk.verify(*extended(), x, y, NoForm())


def test_a_definition_of_another_form() -> None:
    x, y = data()
    result = bpk.verify(*extended(), x, y, WrongForm())
    assert not result and "the definition gives, for the entries looked at, [5," in str(result)
