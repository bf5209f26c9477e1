"""What a rule computes, as formulas: the symbolic form, the pattern, or else the docstring of its family."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from bpk.jacobians.elementwise import Elementwise
from bpk.jacobians.loss import PointwiseLoss
from bpk.jacobians.multilinear import Multilinear
from bpk.jacobians.rule import Rule
from bpk.jacobians.symbolic import derive
from tools.site.docstrings import to_markdown
from tools.site.markdown import math


def formulas(rule: Rule) -> str:
    """What the layer computes, with its derivatives where they are symbolic."""
    if isinstance(rule, Elementwise):
        names = ("f(x)", "f'(x)", "f''(x)")
        note = "The Jacobian is the diagonal matrix of $1, the residual that of $2 times the output's gradient."
        return symbolic(rule.expressions, rule.choose, names) + note.replace("$1", "`f'`").replace("$2", "`f''`")
    if isinstance(rule, PointwiseLoss):
        names = (r"\ell(x, t)", r"\partial_x \ell", r"\partial_x^2 \ell")
        note = (
            "Summed over entries, up to terms without `x`, then divided as `reduction` says. The Hessian is diagonal."
        )
        return symbolic(rule.expressions, rule.choose, names) + note
    if isinstance(rule, Multilinear):
        operands = ", ".join(("inputs", *rule.factors))
        return f"`out = einsum({rule.pattern!r}, {operands})`."
    return "\n".join(to_markdown(family_text(rule)))


def hyperparameters(rule: Rule) -> list[str]:
    """Names in an expression that are neither variable nor function, and where their values come from."""
    if not isinstance(rule, Elementwise):
        return []
    names = dict.fromkeys(name for text in rule.expressions.values() for name in derive(text).hyper)
    values = {name: rule.hyper.get(name, name) for name in names}
    return [
        f"`{name}` (the layer's attribute `{value}`)" if isinstance(value, str) else f"`{name} = {value:.6g}`"
        for name, value in values.items()
    ]


def symbolic(expressions: Mapping[Any, str], choose: str, names: tuple[str, str, str]) -> str:
    """Each expression with its first two derivatives."""
    parts = []
    for choice, expression in expressions.items():
        if choose:
            parts.append(f"With `{choose}={choice!r}`:\n\n")
        derived = derive(expression)
        parts += [math(f"{name} = {derived.latex(k)}") + "\n\n" for k, name in enumerate(names)]
    return "".join(parts)


def family_text(rule: Rule) -> str:
    """The first paragraph of the docstring of the rule's class."""
    text = inspect.getdoc(type(rule)) or ""
    return text.split("\n\nArgs:")[0].split("\n\n>>> ")[0]
