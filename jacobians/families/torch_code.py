"""The printer: a sympy expression in `x` and hyperparameters as a compiled torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.functions import FUNCTIONS


def _select(condition: Any, a: Any, b: Any, x: Tensor) -> Any:
    """`torch.where` whose branches may be numbers: they take the dtype and the device of `x`."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return _mask(condition, a, b, x.dtype)
    a, b = (v if isinstance(v, Tensor) else torch.full((), v, dtype=x.dtype, device=x.device) for v in (a, b))
    return torch.where(condition, a, b)


def _mask(condition: Tensor, a: float, b: float, dtype: torch.dtype) -> Tensor:
    """Two numbers chosen by a condition: masks take a tenth of the time of `torch.where` on a CPU."""
    if a == 0:
        off = (~condition).to(dtype)
        return off if b == 1 else off * b
    on = condition.to(dtype)
    if b != 0:
        return (on * a).add(~condition, alpha=b)
    return on if a == 1 else on * a


def _scalar(function: Callable[[Tensor], Tensor], value: float) -> float:
    """A function of hyperparameters alone."""
    return float(function(torch.tensor(float(value), dtype=torch.float64, device="cpu")))


_NAMESPACE: dict[str, Any] = {f"f_{name}": f.torch for name, f in FUNCTIONS.items()}
_NAMESPACE.update(select=_select, scalar=_scalar, full_like=torch.full_like)


def print_code(algebra: SimpleNamespace, expressions: Sequence[Any], hyper: tuple[str, ...]) -> str:
    """Several expressions as one function of a tensor `x` and numbers; what occurs in more than one is computed once.

    The function is called `function`, and returns a tuple.
    """
    roots = [_guarded(algebra, expression) for expression in expressions]
    printer = _Printer(algebra, algebra.sympy.Tuple(*roots))
    codes = [(printer.code(e), printer.is_tensor(e)) for e in roots]
    results = [code if is_tensor else f"full_like(x, {code})" for code, is_tensor in codes]
    arguments = ", ".join(["x", *(f"h_{name}" for name in hyper)])
    return "\n    ".join([f"def function({arguments}):", *printer.lines, f"return {', '.join(results)},"])


def compile_code(source: str) -> Callable[..., tuple[Tensor, ...]]:
    """What `print_code` has printed, as a function; half precision is computed in float32."""
    scope = dict(_NAMESPACE)
    exec(compile(source, "<derived from an expression>", "exec"), scope)
    compiled = scope["function"]

    def function(x: Tensor, *values: float) -> tuple[Tensor, ...]:
        if x.dtype in (torch.bfloat16, torch.float16):
            return tuple([y.to(x.dtype) for y in compiled(x.float(), *values)])
        return compiled(x, *values)

    return function


def compile_single(source: str) -> Callable[..., Tensor]:
    """The same for one expression, without the tuple."""
    compiled = compile_code(source)

    def function(x: Tensor, *values: float) -> Tensor:
        return compiled(x, *values)[0]

    return function


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
        raise RuleError(f"{e} cannot be written as torch code.", "", f"use {', '.join(FUNCTIONS)}, where.")

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
