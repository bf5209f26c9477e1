"""Products, quotients and extrema of two tensors, entry by entry: `x * y` (gates), `x / y`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, reading, require_constant, swapped
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.pairwise import Derivatives, Pairwise
from bpk.jacobians.rule import Rule
from bpk.rules.arithmetic import ScaleModule
from bpk.rules.power import Power, away_from_zero

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def multiply(x: Tensor, y: Tensor, /) -> Tensor:
    """The product of two tensors, entry by entry, `out = x * y`."""
    return x * y


def divide(x: Tensor, y: Tensor, /) -> Tensor:
    """The quotient of two tensors, entry by entry, `out = x / y`."""
    return x / y


def larger(x: Tensor, y: Tensor, /) -> Tensor:
    """The larger of two tensors, entry by entry."""
    return torch.maximum(x, y)


def smaller(x: Tensor, y: Tensor, /) -> Tensor:
    """The smaller of two tensors, entry by entry."""
    return torch.minimum(x, y)


Product = layer("Product", multiply, home="product")
Quotient = layer("Quotient", divide, home="product")
Maximum = layer("Maximum", larger, home="product")
Minimum = layer("Minimum", smaller, home="product")


# ---- the rules ---------------------------------------------------------------------------------------
def of_product(x: Tensor, y: Tensor) -> Derivatives:
    """Of `x y`."""
    return Derivatives(x=y, y=x, xy=1.0)


def of_quotient(x: Tensor, y: Tensor) -> Derivatives:
    """Of `x / y`."""
    inverse = 1 / y
    slope = -x * inverse**2
    return Derivatives(x=inverse, y=slope, xy=-(inverse**2), yy=-2 * slope * inverse)


def of_maximum(x: Tensor, y: Tensor) -> Derivatives:
    """Of `max(x, y)`: where both are equal, half of it each, and NaN belongs to both, as in PyTorch."""
    share = torch.where(x == y, 0.5, 1.0).to(x.dtype)
    return Derivatives(x=share.masked_fill(x < y, 0.0), y=share.masked_fill(x > y, 0.0))


def of_minimum(x: Tensor, y: Tensor) -> Derivatives:
    """Of `min(x, y)`."""
    at = of_maximum(x, y)
    return Derivatives(x=at.y, y=at.x)


# ---- how functions are read --------------------------------------------------------------------------
def times(x: Traced, weight: Any) -> Conversion:
    """`weight * x`, with a number or tensor that is known."""
    require_constant("the factor", weight)
    return Conversion(ScaleModule(weight), (x,))


def mul(input: Any, other: Any) -> Conversion:
    """`input * other`."""
    if isinstance(input, Traced) and isinstance(other, Traced):
        return Conversion(Product(), (input, other))
    return times(input, other) if isinstance(input, Traced) else times(other, input)


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Conversion:
    """`input / other`."""
    if rounding_mode is not None:
        raise CannotConvert("a quotient that is rounded has no derivative.")
    if isinstance(input, Traced) and isinstance(other, Traced):
        return Conversion(Quotient(), (input, other))
    if not isinstance(input, Traced):
        require_constant("the dividend", input)
        if isinstance(input, Tensor):
            raise CannotConvert("the quotient of a fixed tensor and one of the model is not known.")
        return Conversion(Power(-1, input), (other,))
    require_constant("the divisor", other)
    if isinstance(other, Tensor) and not other.is_floating_point():
        raise CannotConvert("the divisors are whole numbers, whose inverses have the default precision alone.")
    if not isinstance(other, Tensor) and other == 0:
        raise CannotConvert("it divides by zero.")
    return times(input, 1 / other)


PAIR = ((3, 4), (3, 4))
FIRST_REPEATED = ((2, 1, 3), (2, 2, 3))
SECOND_REPEATED = ((2, 2, 2), (2, 2, 1))

RULES: tuple[Rule, ...] = (
    Pairwise(
        Product,
        derivatives=of_product,
        functions=reading(mul, torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__, operator.mul),
        examples=tuple(case(Product, shapes=s) for s in (PAIR, FIRST_REPEATED, SECOND_REPEATED)),
    ),
    Pairwise(
        Quotient,
        derivatives=of_quotient,
        functions=reading(
            div,
            torch.div,
            torch.divide,
            torch.true_divide,
            T.div,
            T.divide,
            T.true_divide,
            T.__truediv__,
            operator.truediv,
        )
        | reading(swapped(div), T.__rtruediv__, T.__rdiv__),
        examples=tuple(
            case(Quotient, shapes=s, domain=away_from_zero) for s in (PAIR, FIRST_REPEATED, SECOND_REPEATED)
        ),
    ),
    Pairwise(
        Maximum,
        derivatives=of_maximum,
        functions=reading(lambda input, other: Conversion(Maximum(), (input, other)), torch.maximum, T.maximum),
        examples=(case(Maximum, shapes=PAIR), case(Maximum, shapes=FIRST_REPEATED)),
    ),
    Pairwise(
        Minimum,
        derivatives=of_minimum,
        functions=reading(lambda input, other: Conversion(Minimum(), (input, other)), torch.minimum, T.minimum),
        examples=(case(Minimum, shapes=PAIR), case(Minimum, shapes=SECOND_REPEATED)),
    ),
)
