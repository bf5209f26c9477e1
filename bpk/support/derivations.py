"""Write down what sympy says of the expressions of built-in rules: `python -m bpk.support.derivations`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.families.symbolic import WRITTEN, derive_by_sympy
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.rule import Rule
from bpk.rules import load


def expressions(rules: Iterable[Rule]) -> set[str]:
    """The expressions of rules."""
    found = set[str]()
    for rule in rules:
        if isinstance(rule, Elementwise | PointwiseLoss):
            found.update(rule.expressions.values())
    return found


def derivations() -> dict[str, dict[str, Any]]:
    """What sympy says of those of built-in rules."""
    return {expression: derive_by_sympy(expression) for expression in sorted(expressions(load()))}


if __name__ == "__main__":
    WRITTEN.write_text(json.dumps(derivations(), indent=1) + "\n")
