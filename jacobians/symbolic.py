"""From one expression in `x` to a function and its first two derivatives, as torch code.

An activation is written as a string, such as `"x*sigmoid(x)"` or `"where(x <= 0, 0, x)"`. sympy
differentiates it, a small printer turns the results into torch code. Every function that may be used
stands in `FUNCTIONS` with its derivative in closed form, chosen so that value and derivatives are finite
and accurate far out in float32 (`sigmoid(x)*sigmoid(-x)`, not `exp(-x)/(1 + exp(-x))**2`). Kinks are
written with `where`, whose condition says which side a kink (and NaN) belongs to. Nothing is simplified:
sympy only applies the chain rule. sympy is imported on the first derivation, not with this module.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.errors import RuleError, explain


def _softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)  # no overflow, and exact in both tails


class Function(NamedTuple):
    """A function of one argument: its torch code, its derivative as an expression in `x`, its LaTeX name.

    `finite` says that all its derivatives are finite on the whole real line.
    """

    torch: Callable[[Tensor], Tensor]
    derivative: str
    latex: str = ""
    finite: bool = True


FUNCTIONS: dict[str, Function] = {
    "sigmoid": Function(torch.sigmoid, "sigmoid(x)*sigmoid(-x)", r"\sigma"),
    "logsigmoid": Function(F.logsigmoid, "sigmoid(-x)", r"\log\sigma"),
    "softplus": Function(_softplus, "sigmoid(x)"),
    "softsign": Function(F.softsign, "(1 + abs(x))**-2"),
    "tanh": Function(torch.tanh, "1 - tanh(x)**2", r"\tanh"),
    "erf": Function(torch.erf, "2/sqrt(pi)*exp(-x**2)"),
    "erfc": Function(torch.erfc, "-2/sqrt(pi)*exp(-x**2)"),
    "atan": Function(torch.atan, "1/(1 + x**2)", r"\arctan"),
    "asinh": Function(torch.asinh, "1/sqrt(1 + x**2)"),
    "sin": Function(torch.sin, "cos(x)", r"\sin"),
    "cos": Function(torch.cos, "-sin(x)", r"\cos"),
    "abs": Function(torch.abs, "sign(x)"),
    "sign": Function(torch.sign, "0"),
    "exp": Function(torch.exp, "exp(x)", r"\exp", finite=False),
    "expm1": Function(torch.expm1, "exp(x)", finite=False),
    "sinh": Function(torch.sinh, "cosh(x)", r"\sinh", finite=False),
    "cosh": Function(torch.cosh, "sinh(x)", r"\cosh", finite=False),
    "tan": Function(torch.tan, "1 + tan(x)**2", r"\tan", finite=False),
    "log": Function(torch.log, "1/x", r"\log", finite=False),
    "log1p": Function(torch.log1p, "1/(1 + x)", finite=False),
    "sqrt": Function(torch.sqrt, "1/(2*sqrt(x))", finite=False),
    "rsqrt": Function(torch.rsqrt, "-rsqrt(x)**3/2", finite=False),
    "asin": Function(torch.asin, "rsqrt(1 - x**2)", r"\arcsin", finite=False),
    "acos": Function(torch.acos, "-rsqrt(1 - x**2)", r"\arccos", finite=False),
}
MACROS = ("where", "relu", "clamp", "max", "min", "pi")


@dataclass(frozen=True)
class Derivation:
    """A function of `x` and hyperparameters, with its first and second derivative.

    `compiled[k](x, *hyper)` is the `k`-th derivative, elementwise; `hyper` are the names of the
    hyperparameters in the order in which they are passed. `linear` says that the second derivative is
    zero everywhere (between the kinks). `source` is the generated code.
    """

    hyper: tuple[str, ...]
    compiled: tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]
    source: tuple[str, str, str]
    linear: bool
    symbolic: tuple[Any, Any, Any]

    def latex(self, order: int = 0) -> str:
        """The `order`-th derivative as LaTeX, for the documentation."""
        import sympy

        expression = self.symbolic[order]
        words = {s: rf"\mathrm{{{s.name}}}".replace("_", r"\_") for s in expression.free_symbols if _is_word(s.name)}
        return str(sympy.latex(expression, symbol_names=words))


def _is_word(name: str) -> bool:
    return len(name) > 1 and name not in ("alpha", "beta", "gamma", "delta", "lambda", "mu", "sigma")


def hyperparameters(expression: str) -> tuple[str, ...]:
    """Names in `expression` other than `x` and the known functions; raises `RuleError` on any mistake.

    >>> hyperparameters("where(x > 0, x, negative_slope*x)")
    ('negative_slope',)
    """
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except SyntaxError as error:
        raise RuleError(explain(f"{expression!r} is not an expression.", str(error), "write e.g. 'x*sigmoid(x)'."))
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    known = {*FUNCTIONS, *MACROS}
    if unknown := sorted(called - known):
        raise RuleError(
            explain(
                f"{expression!r} uses {', '.join(unknown)}.",
                "this function has no derivative in the table.",
                f"use {', '.join(sorted(known))}, or add it to FUNCTIONS with its derivative.",
                "jacobians/symbolic.py",
            )
        )
    names = {n.id: None for n in nodes if isinstance(n, ast.Name)}
    return tuple(n for n in names if n != "x" and n not in known)


@cache
def derive(expression: str) -> Derivation:
    """Differentiate an expression in `x` twice and compile it and both derivatives.

    >>> f = derive("where(x <= 0, 0, x**2)")
    >>> [g(torch.tensor([-1.0, 3.0])).tolist() for g in f.compiled]
    [[0.0, 9.0], [0.0, 6.0], [0.0, 2.0]]
    """
    hyper = hyperparameters(expression)
    algebra = _algebra()
    value = algebra.parse(expression, hyper)
    first = value.diff(algebra.x)
    second = first.diff(algebra.x)
    orders = (value, first, second)
    made = [_compile(algebra, order, hyper) for order in orders]
    functions, sources = tuple(f for f, _ in made), tuple(s for _, s in made)
    return Derivation(hyper, functions, sources, second == 0, orders)  # type: ignore[arg-type]


@cache
def _algebra() -> SimpleNamespace:
    """sympy, its symbol `x`, and the functions of the table as sympy functions (on first use)."""
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    x = sympy.Symbol("x", real=True)

    class where(sympy.Function):  # type: ignore[misc]  # noqa: N801 - its name in expressions and LaTeX
        """`where(condition, a, b)`; unlike Piecewise it never rewrites the condition (NaN, kinks)."""

        @classmethod
        def eval(cls, condition: Any, a: Any, b: Any) -> Any:
            if condition in (sympy.true, sympy.false):
                return a if condition == sympy.true else b
            return a if a == b else None

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

    def latex(self: Any, printer: Any, exp: str | None = None) -> str:
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
        names[name] = type(name, (sympy.Function,), {"nargs": 1, "fdiff": fdiff, "_latex": latex})
    names["sqrt"].eval = root_of_number
    return SimpleNamespace(sympy=sympy, x=x, where=where, parse=parse)


# ---- the printer: sympy expressions as torch code ------------------------------------------------


def _select(condition: Any, a: Any, b: Any, x: Tensor) -> Any:
    """`torch.where` whose branches may be numbers: they take the dtype and the device of `x`."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    a, b = (v if isinstance(v, Tensor) else torch.full((), v, dtype=x.dtype, device=x.device) for v in (a, b))
    return torch.where(condition, a, b)


def _scalar(function: Callable[[Tensor], Tensor], value: float) -> float:
    """A function of hyperparameters alone."""
    return float(function(torch.tensor(float(value), dtype=torch.float64)))


_NAMESPACE: dict[str, Any] = {f"f_{name}": f.torch for name, f in FUNCTIONS.items()}
_NAMESPACE.update(select=_select, scalar=_scalar, full_like=torch.full_like)


def _compile(algebra: SimpleNamespace, expression: Any, hyper: tuple[str, ...]) -> tuple[Callable[..., Tensor], str]:
    """An expression as a function of a tensor `x` and numbers; half precision is computed in float32."""
    printer = _Printer(algebra, _guarded(algebra, expression))
    result = printer.code(printer.root)
    if not printer.is_tensor(printer.root):
        result = f"full_like(x, {result})"
    arguments = ", ".join(["x", *(f"h_{name}" for name in hyper)])
    source = "\n    ".join([f"def function({arguments}):", *printer.lines, f"return {result}"])
    scope = dict(_NAMESPACE)
    exec(compile(source, "<derived from an expression>", "exec"), scope)
    compiled = scope["function"]

    def function(x: Tensor, *values: float) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            return compiled(x.float(), *values).to(x.dtype)
        return compiled(x, *values)

    return function, source


def _guarded(algebra: SimpleNamespace, expression: Any) -> Any:
    """Evaluate branches that can overflow only where they are chosen.

    Otherwise differentiating the code once more multiplies the infinite slope of the other branch by zero.
    """
    where, x = algebra.where, algebra.x
    if expression.is_Atom:
        return expression
    if isinstance(expression, where):
        condition, a, b = expression.args
        if not _finite(algebra, a):
            a = a.xreplace({x: where(condition, x, 0)})
        if not _finite(algebra, b):
            b = b.xreplace({x: where(condition, 0, x)})
        return where(condition, a, b)
    return expression.func(*[_guarded(algebra, arg) for arg in expression.args])


def _finite(algebra: SimpleNamespace, e: Any) -> bool:
    """Whether `e` and its derivatives are finite for every finite `x`."""
    if algebra.x not in e.free_symbols:
        return True
    if isinstance(e, algebra.sympy.Pow) and not (e.exp.is_Integer and e.exp >= 0):
        return False
    if isinstance(e, algebra.sympy.Function) and not isinstance(e, algebra.where):
        return FUNCTIONS[type(e).__name__].finite and _finite(algebra, e.args[0])
    return all(_finite(algebra, arg) for arg in e.args)


class _Printer:
    """Torch code for one expression; what occurs twice is computed once, in `lines`."""

    def __init__(self, algebra: SimpleNamespace, root: Any) -> None:
        self.algebra = algebra
        self.root = root
        self.lines: list[str] = []
        self._uses: dict[Any, int] = {}
        self._names: dict[Any, str] = {}
        self._count(root)

    def is_tensor(self, e: Any) -> bool:
        return self.algebra.x in e.free_symbols

    def code(self, e: Any) -> str:
        if e in self._names:
            return self._names[e]
        text = self._print(e)
        if not e.free_symbols and not e.is_Boolean:  # a constant, possibly like sqrt(2)/pi
            text = repr(float(eval(text, dict(_NAMESPACE))))
        elif self._uses.get(e, 0) > 1 and not e.is_Atom:
            name = f"t{len(self.lines)}"
            self.lines.append(f"{name} = {text}")
            self._names[e] = text = name
        return text

    def _count(self, e: Any) -> None:
        self._uses[e] = self._uses.get(e, 0) + 1
        if self._uses[e] == 1:
            for arg in e.args:
                self._count(arg)

    def _print(self, e: Any) -> str:
        sympy = self.algebra.sympy
        if e == self.algebra.x:
            return "x"
        if e.is_Symbol:
            return f"h_{e.name}"
        if e.is_Number or e.is_NumberSymbol:
            return repr(float(e))
        if isinstance(e, sympy.Add):
            return self._sum(e)
        if isinstance(e, sympy.Mul):
            return self._product(e)
        if isinstance(e, sympy.Pow):
            exponent = str(int(e.exp)) if e.exp.is_Integer else self.code(e.exp)
            return f"{self.code(e.base)} ** ({exponent})"
        if isinstance(e, self.algebra.where):
            return f"select({', '.join(map(self.code, e.args))}, x)"
        if isinstance(e, sympy.Rel):
            return f"({self.code(e.lhs)} {e.rel_op} {self.code(e.rhs)})"
        if isinstance(e, sympy.And | sympy.Or):
            return "(" + (" & " if isinstance(e, sympy.And) else " | ").join(map(self.code, e.args)) + ")"
        if isinstance(e, sympy.Function) and type(e).__name__ in FUNCTIONS:
            name, argument = f"f_{type(e).__name__}", self.code(e.args[0])
            return f"{name}({argument})" if self.is_tensor(e) else f"scalar({name}, {argument})"
        raise RuleError(explain(f"{e} cannot be written as torch code.", "", f"use {', '.join(FUNCTIONS)}, where."))

    def _sum(self, e: Any) -> str:
        text = ""
        for term in e.args:
            if term.is_Mul and term.args[0] == -1:
                text += f" - {self.code(term.func(*term.args[1:]))}"
            else:
                text += (" + " if text else "") + self.code(term)
        return f"({text.strip()})"

    def _product(self, e: Any) -> str:
        """Numbers first, in one factor, so that tensors are scaled once."""
        constants = [float(self.code(a)) for a in e.args if not a.free_symbols]
        scalars = [self.code(a) for a in e.args if a.free_symbols and not self.is_tensor(a)]
        tensors = [self.code(a) for a in e.args if self.is_tensor(a)]
        if constants:
            scalars.insert(0, repr(prod(constants)))
        scale = [f"({' * '.join(scalars)})" if len(scalars) > 1 else scalars[0]] if scalars else []
        return "(" + " * ".join([*scale, *tensors]) + ")"
