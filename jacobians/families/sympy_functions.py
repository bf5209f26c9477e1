"""The functions of the table, and `where`, as functions of sympy, which is imported on first use."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from bpk.jacobians.core.functions import FUNCTIONS


@cache
def conditional() -> Any:
    """`where(condition, a, b)` as a sympy function (on first use)."""
    import sympy

    class where(sympy.Function):
        """Unlike Piecewise, it never rewrites the condition (NaN, kinks)."""

        @classmethod
        def eval(cls, condition: Any, a: Any, b: Any) -> Any:
            if condition in (sympy.true, sympy.false):
                return a if condition == sympy.true else b
            if a == b:
                return a
            if isinstance(b, where) and b.args[1] == a:  # the same value on both sides of a middle piece
                return where(sympy.Or(condition, b.args[0]), a, b.args[2])
            return None

        def _eval_derivative(self, symbol: Any) -> Any:
            condition, a, b = self.args
            return where(condition, a.diff(symbol), b.diff(symbol))

        def _latex(self, printer: Any) -> str:
            rows, rest = [], self
            while isinstance(rest, where):
                condition, a, rest = rest.args
                rows.append(rf"{printer._print(a)} & {printer._print(condition)}")
            rows.append(rf"{printer._print(rest)} & \text{{otherwise}}")
            return r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"

    return where


@cache
def algebra() -> SimpleNamespace:
    """sympy, its symbol `x`, and the functions of the table as sympy functions (on first use)."""
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    x, where = sympy.Symbol("x", real=True), conditional()

    def relu(a: Any) -> Any:
        return where(a <= 0, 0, a)

    def clamp(a: Any, low: Any, high: Any) -> Any:
        return where(a < low, low, where(a > high, high, a))

    def maximum(a: Any, b: Any) -> Any:
        return where(a > b, a, where(a < b, b, (a + b) / sympy.Integer(2)))  # autograd halves at a tie

    def minimum(a: Any, b: Any) -> Any:
        return where(a < b, a, where(a > b, b, (a + b) / sympy.Integer(2)))

    macros = {"where": where, "relu": relu, "clamp": clamp, "max": maximum, "min": minimum, "pi": sympy.pi}
    names: dict[str, Any] = {**macros, "x": x, "Integer": sympy.Integer, "Float": sympy.Float}

    def parse(expression: str, hyper: tuple[str, ...] = ()) -> Any:
        symbols = {name: sympy.Symbol(name, real=True) for name in hyper}
        return sympy.sympify(parse_expr(expression, {**names, **symbols}, global_dict={"Symbol": sympy.Symbol}))

    def fdiff(self: Any, argindex: int = 1) -> Any:
        return parse(FUNCTIONS[type(self).__name__].derivative).xreplace({x: self.args[0]})

    def show(self: Any, printer: Any, exp: str | None = None) -> str:
        name, argument = type(self).__name__, printer._print(self.args[0])
        power = f"^{{{exp}}}" if exp is not None else ""
        if name == "abs":
            return rf"\left|{argument}\right|{power}"
        if name == "sqrt":
            return rf"\sqrt{{{argument}}}{power}"
        shown = FUNCTIONS[name].latex or rf"\operatorname{{{name}}}"
        return rf"{shown}{power}\left({argument}\right)"

    @classmethod  # type: ignore[misc]
    def root_of_number(cls: Any, argument: Any) -> Any:
        return sympy.Pow(argument, sympy.Rational(1, 2)) if argument.is_number else None

    for name in FUNCTIONS:
        names[name] = type(name, (sympy.Function,), {"nargs": 1, "fdiff": fdiff, "_latex": show})
    names["sqrt"].eval = root_of_number
    return SimpleNamespace(sympy=sympy, x=x, where=where, parse=parse)
