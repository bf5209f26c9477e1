"""Nested arguments and results: what is inside of them, and the same with something else inside."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict

from bpk.jacobians.core.nested import Slot, fill, mapped, substitute, tensors_in

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Held:
    x: Any
    late: Any = field(init=False)

    def __post_init__(self) -> None:
        assert not isinstance(self.x, Slot), "what is filled in is not built anew"


def test_all_tensors_are_found_and_replaced() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    value = [OrderedDict(a=x, b=(y, None)), Pair(Held(y), 3), Held, torch.return_types.max((x, y))]
    assert [t.shape[0] for t in tensors_in(value)] == [1, 2, 2, 1, 2]
    found = substitute(value, {id(y): x})
    assert [t.shape[0] for t in tensors_in(found)] == [1] * 5
    assert [type(part) for part in found] == [type(part) for part in value]
    assert isinstance(found[1].a, Held) and found[1].b == 3 and value[0]["b"][0] is y


def test_slots_are_filled() -> None:
    template = mapped({"x": Held(1), "cut": slice(2, None)}, lambda part: Slot(part) if part else part)
    assert template == {"x": template["x"], "cut": slice(Slot(2), None)} and template["x"].x == Slot(1)
    filled = fill(template, "abc")
    assert fill(immutable_dict(x=Slot(1)), "abc") == {"x": "b"}
    assert filled["x"].x == "b" and filled["cut"] == slice("c", None)


@dataclass
class Cell:
    """Refers to itself by its neighbour."""

    x: Tensor
    neighbour: Cell | None = None


def test_an_instance_that_refers_to_itself_is_looked_into_once() -> None:
    first, second = Cell(torch.ones(1)), Cell(torch.zeros(1))
    first.neighbour, second.neighbour = second, first
    assert [x.item() for x in tensors_in(first)] == [1.0, 0.0]
    assert substitute(first, {id(second.x): torch.tensor([2.0])}).neighbour.x.item() == 2.0
