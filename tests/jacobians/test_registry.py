"""The registry: one rule for each layer, found by class, from built-in files, other packages, and `add`."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import bpk.rules
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


class Renamed(Swish):
    """Another name, the same forward."""


class Changed(Swish):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class FarRenamed(Changed):
    """Its forward is that of `Changed`, which is not the one with a rule."""


class Theirs(nn.Module):
    """A layer of another package."""


def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


class Loader:
    """A source of rules that counts how often it was asked."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules
        self.asked = 0

    def __call__(self) -> tuple[Rule, ...]:
        self.asked += 1
        return self.rules


class FakeEntryPoint:
    """An installed package's entry point."""

    name, value, dist = "theirs", "their.rules:RULES", SimpleNamespace(name="their-package")

    def __init__(self, rules: tuple[Any, ...] | None, error: BaseException | None = None) -> None:
        self.rules = rules
        self.error = error

    def load(self) -> tuple[Rule, ...]:
        if self.error is not None:
            raise self.error
        if self.rules is None:
            raise ImportError("it needs a library that is not there")
        return self.rules


def test_found_by_module_class_and_function() -> None:
    rule = Autodiff(Swish, functions=(swish,))
    registry = Registry(Loader(rule))
    assert registry.find(Swish()) is rule
    assert registry.find(Swish) is rule
    assert registry.find_function(swish) is rule
    assert registry.find(nn.Tanh()) is None
    assert registry.find_function(torch.tanh) is None
    assert list(registry) == [rule]


def test_loaded_once_and_only_on_first_use() -> None:
    loader = Loader(Autodiff(Swish))
    registry = Registry(loader)
    assert loader.asked == 0
    assert registry.find(Swish) is registry.find(Swish())
    assert list(registry)
    assert loader.asked == 1


def test_subclass_without_its_own_forward_is_found() -> None:
    rule = Autodiff(Swish)
    assert Registry(Loader(rule)).find(Renamed()) is rule


@pytest.mark.parametrize("cls", [Changed, FarRenamed])
def test_subclass_with_its_own_forward_is_not_found(cls: type[nn.Module]) -> None:
    assert Registry(Loader(Autodiff(Swish))).find(cls()) is None


def test_forward_set_on_a_class_of_torch_before_the_rules_are_read() -> None:
    rule = Autodiff(nn.BatchNorm1d)
    registry, own = Registry(Loader(rule)), nn.BatchNorm1d.forward
    with mock.patch.object(nn.BatchNorm1d, "forward", lambda self, x: x):
        assert registry.find(nn.BatchNorm1d) is None
        nn.BatchNorm1d.forward = own  # type: ignore[method-assign]  # as its base defines it
        assert registry.find(nn.BatchNorm1d) is rule
        nn.BatchNorm1d.forward = nn.Linear.forward  # type: ignore[method-assign, assignment]
        assert registry.find(nn.BatchNorm1d) is None
    assert registry.find(nn.BatchNorm1d) is rule


def test_a_rule_of_a_user_describes_the_class_as_it_was_registered() -> None:
    registry, rule = Registry(Loader()), Autodiff(nn.Tanh)
    with mock.patch.object(nn.Tanh, "forward", lambda self, x: x.sin()):
        registry.add(rule)
        assert registry.find(nn.Tanh) is rule
    assert registry.find(nn.Tanh) is None
    registry, rule = Registry(Loader(Autodiff(Swish))), Autodiff(Swish)
    assert registry.find(Renamed) is not None
    with mock.patch.object(Swish, "forward", mock.MagicMock()):
        assert registry.find(Renamed) is registry.find(Swish) is None
    assert registry.find(Renamed) is registry.find(Swish) is not None


def test_subclass_may_have_its_own_rule() -> None:
    general, special = Autodiff(Swish), Autodiff(Renamed)
    registry = Registry(Loader(general))
    assert registry.find(Renamed) is general
    registry.add(special)
    assert registry.find(Renamed) is special
    assert registry.find(Swish) is general


@pytest.mark.parametrize(
    ("first", "second", "owner"),
    [
        (Autodiff(Swish), Autodiff(Swish), "Swish"),
        (Autodiff(Swish, functions=(swish,)), Autodiff(Changed, functions=(swish,)), "swish"),
    ],
)
def test_a_second_rule_is_refused(first: Rule, second: Rule, owner: str) -> None:
    registry = Registry(Loader(first))
    with pytest.raises(RuleError) as error:
        registry.add(second)
    message = str(error.value)
    assert message.startswith(f"{owner} has two rules: {first!r} and {second!r}.")
    assert "Why:" in message
    assert "Do:" in message and "bpk.unregister()" in message
    assert list(registry) == [first]
    assert registry.find(Changed) is None, "a refused rule must not be registered in part"


def test_two_rules_for_one_layer_in_the_files_are_refused() -> None:
    registry = Registry(Loader(Autodiff(Swish), Autodiff(Swish)))
    with pytest.raises(RuleError, match="Swish has two rules"):
        registry.find(Swish)


def test_removed_rule_is_not_found_and_can_be_added_again() -> None:
    rule = Autodiff(Swish, functions=(swish,))
    registry = Registry(Loader(rule))
    assert registry.find(Renamed) is rule
    registry.remove(rule)
    assert registry.find(Swish) is None
    assert registry.find(Renamed) is None
    assert registry.find_function(swish) is None
    assert list(registry) == []
    registry.add(rule)
    assert registry.find(Renamed) is rule


@pytest.mark.parametrize("what", [Swish, Swish(), "tanh(x)"])
def test_what_is_not_a_rule_is_refused(what: object) -> None:
    registry = Registry(Loader())
    with pytest.raises(RuleError, match=r"is not a rule\.\n  Why: register\(\) takes an instance of a family"):
        registry.add(what)  # type: ignore[arg-type]


def test_rules_of_other_packages_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Autodiff(Swish)
    asked: list[str] = []

    def entry_points(group: str) -> tuple[FakeEntryPoint, ...]:
        asked.append(group)
        return (FakeEntryPoint((rule,)),)

    monkeypatch.setattr(bpk.rules, "entry_points", entry_points)
    registry = Registry(bpk.rules.load, bpk.rules.announced)
    assert registry.find(Renamed()) is rule
    assert registry.find(nn.Linear) is not None, "the built-in rules are there, too"
    assert asked == ["bpk.rules"]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (FakeEntryPoint((Autodiff(Theirs), Autodiff(nn.Linear))), "are left out: Linear has two rules"),
        (FakeEntryPoint((Autodiff(Theirs), nn.Tanh())), r"are left out: Tanh\(\) is not a rule"),
        (FakeEntryPoint((), SystemExit(0)), r"cannot be loaded: SystemExit\(0\)"),
        (FakeEntryPoint((), TypeError("no")), r"cannot be loaded: TypeError\('no'\)"),
    ],
    ids=["overrides", "no rule", "exits", "raises"],
)
def test_rules_of_another_package_that_cannot_be_added_are_left_out(
    entry: FakeEntryPoint, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpk.rules, "entry_points", lambda group: (entry, FakeEntryPoint((Autodiff(Swish),))))
    registry = Registry(bpk.rules.load, bpk.rules.announced)
    with pytest.warns(UserWarning, match=f"package 'their-package', announced as 'theirs'.*{reason}.*\n.*\n.*Do:"):
        assert registry.find(nn.Linear) is bpk.rules.REGISTRY.find(nn.Linear)
    assert registry.find(Theirs) is None, "all of its rules are left out"
    assert registry.find(Swish) is not None, "those of other packages are there"


def test_rules_of_another_package_that_cannot_be_imported_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (FakeEntryPoint(None), FakeEntryPoint((Autodiff(Swish),)))
    monkeypatch.setattr(bpk.rules, "entry_points", lambda group: entries)
    registry = Registry(bpk.rules.load, bpk.rules.announced)
    with pytest.warns(UserWarning, match=r"(?s)'theirs' \(their\.rules:RULES\).*a library that is not there.*Do:"):
        assert registry.find(nn.Linear) is not None
    assert registry.find(Swish) is not None, "those of other packages are there"


def test_every_module_and_function_has_one_rule() -> None:
    owners = [owner for rule in bpk.rules.REGISTRY for owner in {*rule.modules, *rule.functions}]
    assert len(owners) == len(set(owners))
    assert all(bpk.rules.REGISTRY.find(rule.modules[0]) is rule for rule in bpk.rules.REGISTRY if rule.modules)


def test_importing_rules_imports_no_sympy() -> None:
    """Neither the import nor looking up a rule derives anything (torch itself may import sympy)."""
    code = (
        "import sys, torch; before = set(sys.modules); import bpk.rules; from torch import nn; "
        "bpk.rules.REGISTRY.find(nn.Tanh); "
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in ('sympy', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
