"""The functions of one argument that an expression may use: a table of derivatives.

Each derivative is in closed form, chosen to be finite and accurate far out in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
