"""From one expression in `x` to a function and its derivatives, as torch code: two of them, further ones on first use.

An activation is written as a string, such as `"x*sigmoid(x)"` or `"where(x <= 0, 0, x)"`. sympy
differentiates it, a small printer turns the results into torch code. The functions that may be used
stand in `FUNCTIONS`, each with its derivative in closed form (`sigmoid(x)*sigmoid(-x)`, not
`exp(-x)/(1 + exp(-x))**2`). Kinks are written with `where`, whose condition says which side a kink (and
NaN) belongs to. Nothing is simplified: sympy only applies the chain rule.

Importing sympy takes a third of a second and 30 MB. What it has said of the built-in rules is therefore written in
`derivations.json` (`python -m bpk.support.derivations`, compared by a test); it is imported for all others, for further
derivatives, and for the documentation.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.functions import FUNCTIONS
from bpk.jacobians.families.sympy_functions import algebra
from bpk.jacobians.families.torch_code import compile_code, compile_single, print_code

WRITTEN = Path(__file__).with_name("derivations.json")
"""What sympy has said of the expressions of built-in rules."""

MACROS = ("where", "relu", "clamp", "max", "min", "pi")
GREEK = ("alpha", "beta", "gamma", "delta", "lambda", "mu", "sigma")


@dataclass(frozen=True)
class Derivation:
    """A function of `x` and hyperparameters, with its first and second derivative.

    `compiled[k](x, *hyper)` is the `k`-th derivative, elementwise; `hyper` are the names of the
    hyperparameters in the order in which they are passed. `linear` says that the second derivative is
    zero everywhere (between the kinks). A slope that is 0 for `x <= c` and else 1 `opens_at` `c`. `source` is the
    generated code.
    """

    expression: str
    hyper: tuple[str, ...]
    compiled: tuple[Callable[..., Tensor], ...]
    source: tuple[str, ...]
    linear: bool
    opens_at: float | None = None

    @property
    def symbolic(self) -> tuple[Any, ...]:
        """The three as sympy expressions."""
        return tuple(_symbolic(self.expression, order) for order in range(3))


def latex(expression: Any) -> str:
    """An expression of sympy as LaTeX, for the documentation."""
    import sympy

    words = [s for s in expression.free_symbols if len(s.name) > 1 and s.name not in GREEK]
    names = {s: rf"\mathrm{{{s.name}}}".replace("_", r"\_") for s in words}
    return str(sympy.latex(expression, symbol_names=names, mul_symbol="dot"))


def hyperparameters(expression: str) -> tuple[str, ...]:
    """Names in `expression` other than `x` and the known functions; raises `RuleError` on any mistake.

    >>> hyperparameters("where(x > 0, x, negative_slope*x)")
    ('negative_slope',)
    """
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except SyntaxError as error:
        raise RuleError(f"{expression!r} is not an expression.", str(error), "write e.g. 'x*sigmoid(x)'.") from error
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    known = {*FUNCTIONS, *MACROS}
    if unknown := sorted(called - known):
        raise RuleError(
            f"{expression!r} uses {', '.join(unknown)}.",
            "this function has no derivative in the table.",
            f"use {', '.join(sorted(known))}, or add it to FUNCTIONS with its derivative.",
            "jacobians/core/functions.py",
        )
    names = {n.id: None for n in nodes if isinstance(n, ast.Name)}
    return tuple(n for n in names if n != "x" and n not in known)


@cache
def derive(expression: str) -> Derivation:
    """Differentiate an expression in `x` twice and compile it and both derivatives.

    >>> import torch
    >>> f = derive("where(x <= 0, 0, x**2)")
    >>> [g(torch.tensor([-1.0, 3.0])).tolist() for g in f.compiled]
    [[0.0, 9.0], [0.0, 6.0], [0.0, 2.0]]
    """
    known = written().get(expression) or derive_by_sympy(expression)
    source = tuple(known["source"])
    compiled = tuple(map(compile_single, source))
    return Derivation(expression, hyperparameters(expression), compiled, source, known["linear"], known["opens_at"])


@cache
def written() -> dict[str, dict[str, Any]]:
    """By expression: what `derive_by_sympy` has said."""
    return json.loads(WRITTEN.read_text())


def derive_by_sympy(expression: str) -> dict[str, Any]:
    """The code of a function and its first two derivatives, and what is known of these, as it is written in a file."""
    orders = [_symbolic(expression, order) for order in range(3)]
    source = [print_code(algebra(), (order,), hyperparameters(expression)) for order in orders]
    return {"source": source, "linear": bool(orders[2] == 0), "opens_at": _opens_at(orders[1])}


def _opens_at(slope: Any) -> float | None:
    """`c` of a slope that is 0 for `x <= c` and else 1 (`None`: it is another one)."""
    known = algebra()
    if not isinstance(slope, known.where) or slope.args[1:] != (0, 1):
        return None
    condition = slope.args[0]
    below = isinstance(condition, known.sympy.Le) and condition.lhs == known.x and condition.rhs.is_number
    return float(condition.rhs) if below else None


@cache
def derivative(expression: str, order: int) -> Callable[..., Tensor]:
    """The `order`-th derivative of an expression, as `Derivation.compiled` has them; derived on first use.

    >>> import torch
    >>> derivative("tanh(x)", 3)(torch.zeros(1))
    tensor([-2.])
    """
    derived = derive(expression)
    if order < len(derived.compiled):
        return derived.compiled[order]
    return compile_single(print_code(algebra(), (_symbolic(expression, order),), derived.hyper))


@cache
def derivatives(expression: str, order: int) -> Callable[..., tuple[Tensor, ...]]:
    """The first derivatives of an expression, up to this order, by one function.

    >>> import torch
    >>> [d.item() for d in derivatives("exp(x)", 2)(torch.zeros(1))]
    [1.0, 1.0]
    """
    orders = [_symbolic(expression, k) for k in range(1, order + 1)]
    return compile_code(print_code(algebra(), orders, hyperparameters(expression)))


@cache
def _symbolic(expression: str, order: int) -> Any:
    """The `order`-th derivative in sympy, which applies the chain rule once to the one before."""
    known = algebra()
    if not order:
        return known.parse(expression, hyperparameters(expression))
    return _symbolic(expression, order - 1).diff(known.x)
