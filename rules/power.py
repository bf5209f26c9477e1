"""Powers, exponentials and limits of a tensor, with numbers: `x ** 2`, `2 ** x`, `x.clamp(0, 1)`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Options, Wrt, once
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, reading, require_constant, swapped
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.series import Series
from bpk.jacobians.families.elementwise import Elementwise, Pointwise, positive_numbers
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def power(x: Tensor, /, exponent: float, weight: float = 1.0) -> Tensor:
    """A fixed power of every entry, `out = weight * x ** exponent`."""
    return x**exponent if weight == 1 else weight * x**exponent


def exponential(x: Tensor, /, rate: float = 1.0) -> Tensor:
    """`out = exp(rate * x)`: a fixed base to the power of every entry."""
    return (rate * x).exp()


def clamp(x: Tensor, /, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Limit every entry to `[low, high]`; at the limits the derivative is 1, as in `torch.clamp`."""
    return x.clamp(low, high)


Power = layer("Power", power, home="product")
Exponential = layer("Exponential", exponential, home="product")
Clamp = layer("Clamp", clamp, home="product")


# ---- the rules ---------------------------------------------------------------------------------------
class FixedPower(Pointwise):
    """`out = w x^e`: slope `w e x^(e-1)`, residual diagonal `w e (e-1) x^(e-2) g`."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return options.forward(inputs[0])

    @once
    def slope(self, call: Call) -> Tensor:
        weight, e = call.options.weight, call.options.exponent
        return self._multiple(weight * e, call.inputs[0], e - 1)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO if call.options.exponent in (0, 1) else Residual.DIAGONAL

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        weight, e = call.options.weight, call.options.exponent
        return self._multiple(weight * e * (e - 1), call.inputs[0], e - 2) * grad_out

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """By Faà di Bruno: `f^(m) = w e (e-1) ... (e-m+1) x^(e-m)`."""
        factor, e, derivatives = call.options.weight, call.options.exponent, list[Tensor]()
        for k in range(series[0].order):
            factor = factor * (e - k)
            derivatives.append(self._multiple(factor, call.inputs[0], e - k - 1))
        return series[0].compose(call.output, derivatives)

    @staticmethod
    def _multiple(factor: float, x: Tensor, exponent: float) -> Tensor:
        return torch.zeros_like(x) if factor == 0 else factor * x**exponent


# ---- how functions are read --------------------------------------------------------------------------
def pow(input: Any, exponent: Any) -> Conversion:
    """`input ** exponent`, where one of both is a number."""
    if not isinstance(input, Traced):
        require_constant("the base", input)
        if isinstance(input, Tensor) or input <= 0:
            raise CannotConvert("only positive numbers can be the base of a power of a tensor.")
        return Conversion(Exponential(math.log(input)), (exponent,))
    require_constant("the exponent", exponent)
    if isinstance(exponent, Tensor):
        raise CannotConvert("powers with a tensor of exponents are not known.")
    return Conversion(Power(exponent), (input,))


def clip(input: Any, min: Any = None, max: Any = None) -> Conversion:
    """`torch.clamp(input, min, max)` with numbers."""
    require_constant("a limit", min, max)
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        raise CannotConvert("limits that are tensors are not known.")
    return Conversion(Clamp(-math.inf if min is None else min, math.inf if max is None else max), (input,))


def away_from_zero(x: Tensor) -> Tensor:
    """Divisors: at least one half in size."""
    return torch.where(x < 0, x - 0.5, x + 0.5)


RULES: tuple[Rule, ...] = (
    FixedPower(
        Power,
        functions=reading(pow, torch.pow, T.pow, T.__pow__, operator.pow) | reading(swapped(pow), T.__rpow__),
        examples=(
            case(Power, 2, shape=(3, 4)),
            case(Power, 3, weight=-0.5, shape=(2, 3, 4)),
            case(Power, -1, 2.0, shape=(3, 4), domain=away_from_zero),
            case(Power, 0.5, shape=(3, 4), domain=positive_numbers),
            case(Power, 1, shape=(2, 3)),
        ),
    ),
    Elementwise(
        "exp(rate*x)",
        Exponential,
        examples=(case(Exponential, shape=(3, 4)), case(Exponential, math.log(2), shape=(2, 3, 4))),
    ),
    Elementwise(
        "where(x < low, low, where(x > high, high, x))",
        Clamp,
        functions=reading(clip, torch.clamp, torch.clip, T.clamp, T.clip)
        | reading(lambda input, min: clip(input, min), torch.clamp_min, T.clamp_min)
        | reading(lambda input, max: clip(input, None, max), torch.clamp_max, T.clamp_max),
        examples=(case(Clamp, -0.5, 0.3, shape=(3, 4)), case(Clamp, low=-0.1, shape=(2, 3, 4))),
    ),
)
