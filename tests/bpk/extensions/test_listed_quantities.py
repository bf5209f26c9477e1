"""The registry of quantities: from built-in files, other packages, and `add`."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions import registry
from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.registry import Quantities, every_extension
from bpk.verification import Verdict
from tests.helpers import data
from tests.jacobians.test_registry import FakeEntryPoint


class Doubled(E.BatchGrad):
    """Twice the individual gradients."""

    field = "doubled"
    form = Form.SAMPLES

    def value(self, uses: Any) -> Tensor:
        return 2 * super().value(uses)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return 2 * plain.gradients


class SameField(E.Variance):
    """Another name, the field of another one."""


class Demanding(E.Variance):
    """An extension that has no default."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.savefield = f"variance_{number}"


def test_built_in_files_are_listed() -> None:
    names = [extension.__name__ for extension in registry.load()]
    assert len(names) == len(set(names)) and set(names) == set(E.__all__) - {"HBP"}
    assert all(vars(E)[name] is registry.REGISTRY.find(name) for name in names)
    assert registry.REGISTRY.find("HBP") is None is registry.REGISTRY.find("Doubled")


def test_every_extension_is_a_new_instance() -> None:
    first, second = every_extension(), every_extension()
    assert [type(e) for e in first] == [type(e) for e in second] == list(registry.REGISTRY)
    assert not {id(e) for e in first} & {id(e) for e in second}


def test_collected_once_and_only_on_first_use() -> None:
    asked: list[str] = []

    def load() -> tuple[type[E.BatchGrad], ...]:
        asked.append("files")
        return (E.BatchGrad,)

    quantities = Quantities(load)
    assert not asked
    assert quantities.find("BatchGrad") is E.BatchGrad and list(quantities) == [E.BatchGrad]
    assert asked == ["files"]


def test_an_added_one_is_everywhere_and_can_be_removed() -> None:
    registry.REGISTRY.add(Doubled)
    try:
        assert "Doubled" in bpk.support_matrix().extensions and "Doubled" in bpk.support(nn.Linear(2, 2)).extensions
        result = bpk.verify(nn.Linear(4, 3), nn.CrossEntropyLoss(), *data())
        assert [row.verdict for row in result.rows if row.quantity == "Doubled"] == [Verdict.OK, Verdict.OK]
    finally:
        registry.REGISTRY.remove(Doubled)
    assert "Doubled" not in bpk.support(nn.Linear(2, 2)).extensions


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (E.Variance, r"There are two quantities Variance: bpk\..*Variance and bpk\..*Variance\."),
        (SameField, r"There are two quantities p\.variance: bpk\.extensions.*\.Variance and tests.*\.SameField\."),
        (E.BatchGrad(), "is not a class of extensions"),
        (nn.Linear, "is not a class of extensions"),
        (Demanding, r"Demanding cannot be made without arguments: .*number"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_what_cannot_be_listed_is_refused(second: Any, reason: str) -> None:
    quantities = Quantities(lambda: (E.Variance,))
    with pytest.raises(ValueError, match=f"{reason}.*(?s:.*)Why: (?s:.*)Do: "):
        quantities.add(second)
    assert list(quantities) == [E.Variance]
    with pytest.raises(ValueError, match=reason):
        list(Quantities(lambda: (E.Variance, second)))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (FakeEntryPoint((Doubled, SameField)), "are left out: There are two quantities p.variance"),
        (FakeEntryPoint((Doubled, nn.Tanh())), r"are left out: Tanh\(\) is not a class of extensions"),
        (FakeEntryPoint((), SystemExit(0)), r"cannot be loaded: SystemExit\(0\)"),
        (FakeEntryPoint(None), "cannot be loaded: ImportError"),
    ],
    ids=["overrides", "no extension", "exits", "raises"],
)
def test_quantities_of_another_package_that_cannot_be_added_are_left_out(
    entry: FakeEntryPoint, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def entry_points(group: str) -> tuple[FakeEntryPoint, ...]:
        asked.append(group)
        return (entry,)

    monkeypatch.setattr(registry, "entry_points", entry_points)
    quantities = Quantities(registry.load, registry.announced)
    with pytest.warns(UserWarning, match=f"The quantities of package 'their-package'.*{reason}.*\n.*\n.*Do:"):
        assert quantities.find("Variance") is E.Variance
    assert quantities.find("Doubled") is None, "all of its quantities are left out"
    assert asked == ["bpk.extensions"]
