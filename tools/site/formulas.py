"""What a rule computes, as formulas: the symbolic form, the pattern, or else the docstring of its family."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sympy

from bpk.jacobians.families.contraction import Contraction
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.families.multilinear import Multilinear
from bpk.jacobians.families.symbolic import Derivation, derive, latex
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.rule import Rule
from tools.site.docstrings import to_markdown
from tools.site.markdown import math

TARGET = "t"
"""The target in the expression of a loss."""


def formulas(rule: Rule) -> str:
    """What the layer computes, with its derivatives where they are symbolic."""
    if isinstance(rule, Elementwise):
        names = ("f(x)", "f'(x)", "f''(x)")
        note = "The Jacobian is the diagonal matrix of $1, the residual that of $2 times the output's gradient."
        shown = symbolic(rule.expressions, rule.choose, names, numbers(rule))
        return shown + note.replace("$1", "`f'`").replace("$2", "`f''`")
    if isinstance(rule, PointwiseLoss):
        names = (r"\ell(x, t)", r"\partial_x \ell", r"\partial_x^2 \ell")
        note = (
            "Summed over entries, up to terms without `x`, then divided as `reduction` says. The Hessian is diagonal."
        )
        return symbolic(rule.expressions, rule.choose, names) + note
    if isinstance(rule, Multilinear):
        operands = ", ".join(("inputs", *rule.factors))
        return f"`out = einsum({rule.pattern!r}, {operands})`."
    if isinstance(rule, Contraction):
        return f"`out = einsum({rule.pattern!r}, inputs, weight) + bias`."
    return "\n".join(to_markdown(family_text(rule)))


def hyperparameters(rule: Rule) -> list[str]:
    """Names in an expression that are neither variable nor function nor a number, and where their values come from."""
    if not isinstance(rule, Elementwise | PointwiseLoss):
        return []
    names = dict.fromkeys(name for text in rule.expressions.values() for name in derive(text).hyper if name != TARGET)
    values = {name: rule.hyper.get(name, name) if isinstance(rule, Elementwise) else name for name in names}
    found = {name: value for name, value in values.items() if isinstance(value, str)}
    return [f"`{name}`" if name == value else f"`{name}` (attribute `{value}`)" for name, value in found.items()]


def numbers(rule: Elementwise) -> dict[str, float]:
    """Names in an expression that stand for numbers."""
    return {name: value for name, value in rule.hyper.items() if not isinstance(value, str)}


def symbolic(
    expressions: Mapping[Any, str],
    choose: str,
    names: tuple[str, str, str],
    values: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Each expression with its first two derivatives, and `values` in the places of their names."""
    parts = []
    for choice, expression in expressions.items():
        if choose:
            parts.append(f"With `{choose}={choice!r}`:\n\n")
        shown = with_numbers(derive(expression), values)
        parts += [math(f"{name} = {latex(one)}") + "\n\n" for one, name in zip(shown, names, strict=True)]
    return "".join(parts)


def with_numbers(derived: Derivation, values: Mapping[str, float]) -> list[Any]:
    """Numbers in the places of names: as fractions where they are such, else with six digits."""
    found = {sympy.Symbol(name, real=True): number(value) for name, value in values.items()}
    return [expression.subs(found) for expression in derived.symbolic]


def number(value: float) -> sympy.Number:
    """A number as people write it.

    >>> number(1 / 6), number(0.5), number(1.0507009873554805)
    (1/6, 1/2, 1.05070)
    """
    near = sympy.Rational(value).limit_denominator(100)
    return near if abs(float(near) - value) < 1e-7 else sympy.Float(value, 6)


def family_text(rule: Rule) -> str:
    """The first paragraph of the docstring of the rule's class."""
    text = inspect.getdoc(type(rule)) or ""
    return text.split("\n\nArgs:")[0].split("\n\n>>> ")[0]
