"""Sums and multiples of tensors: what stands between layers as `x + y`, `x - y`, `2 * x`, `x + 1`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.broadcast import collect, spread
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, reading, require_constant, swapped
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.core.products import add_up
from bpk.jacobians.families.linear_map import ZeroResidual
from bpk.jacobians.families.pairwise import Broadcasting

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def total(*inputs: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The sum of all inputs, `out = sum_k w_k x_k` (all weights 1 by default), with broadcasting."""
    if weights is None:
        return add_up(inputs)
    return add_up([x if w == 1 else w * x for w, x in zip(weights, inputs, strict=True)])


def scale(x: Tensor, /, weight: float | Tensor = 1.0) -> Tensor:
    """Multiply with a fixed number, `out = weight * x` (or with a fixed tensor, entry by entry)."""
    return x * weight


def shift(x: Tensor, /, value: float | Tensor = 0.0, weight: float = 1.0) -> Tensor:
    """Add a fixed number or tensor, `out = weight * x + value`."""
    return (x if weight == 1 else weight * x) + value


SumModule = layer("SumModule", total, home="branching")
ScaleModule = layer("ScaleModule", scale, home="scale_module")
Shift = layer("Shift", shift, home="scale_module")


# ---- the rules ---------------------------------------------------------------------------------------
class Addition(ZeroResidual, Broadcasting):
    """`out = sum_k w_k x_k`: the Jacobian with respect to `x_k` is `w_k I`; both products are views where `w_k = 1`."""

    reads_values = False

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return self._weighted(call, spread(mat, call.output.shape[1:], 2), wrt)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self._weighted(call, collect(mat, call.shape_of(wrt)[1:], 2), wrt)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        if call.shape_of(wrt) != call.output.shape:
            return super().congruence(call, matrix, wrt)
        return self._weighted(call, self._weighted(call, matrix, wrt), wrt)

    def _weighted(self, call: Call, mat: Tensor, wrt: Wrt) -> Tensor:
        assert isinstance(wrt, int)
        weight = 1 if call.options.weights is None else call.options.weights[wrt]
        return mat if weight == 1 else weight * mat


class Scaling(ZeroResidual):
    """`out = w * x + const` with a fixed `w`, a number or a tensor that all samples share."""

    reads_values = False

    def acts_on(self, call: Call) -> int | None:
        seen = max((fixed.dim() for fixed in call.options.buffers()), default=0)
        return seen if seen < call.inputs[0].dim() else None

    def obstacle(self, call: Call) -> str | None:
        dims = call.inputs[0].dim()
        for fixed in call.options.buffers():
            if fixed.dim() > dims or (fixed.dim() == dims and fixed.shape[0] != 1):
                return "its fixed tensor differs between samples"
        return None

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return self._scaled(call, spread(mat, call.output.shape[1:], 2))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return collect(self._scaled(call, mat), call.inputs[0].shape[1:], 2)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        weight = call.options.weight
        if isinstance(weight, Tensor) or call.inputs[0].shape != call.output.shape:
            return super().congruence(call, matrix, wrt)
        return matrix if weight == 1 else weight**2 * matrix

    def _scaled(self, call: Call, mat: Tensor) -> Tensor:
        weight = call.options.weight
        return mat if not isinstance(weight, Tensor) and weight == 1 else mat * weight


# ---- how functions are read --------------------------------------------------------------------------
def add(input: Any, other: Any, *, alpha: float = 1) -> Conversion:
    """`input + alpha * other`."""
    require_constant("alpha", alpha)
    if isinstance(input, Traced) and isinstance(other, Traced):
        return Conversion(SumModule() if alpha == 1 else SumModule((1, alpha)), (input, other))
    x, constant = (input, other) if isinstance(input, Traced) else (other, input)
    require_constant("a summand", constant)
    if x is other:
        return Conversion(Shift(constant, alpha), (x,))
    return Conversion(Shift(constant if alpha == 1 else alpha * constant), (x,))


def sub(input: Any, other: Any, *, alpha: float = 1) -> Conversion:
    """`input - alpha * other`."""
    require_constant("alpha", alpha)
    return add(input, other, alpha=-alpha)


def builtin_sum(iterable: Any, /, start: Any = 0) -> Conversion:
    """`sum([x, y, z])` of a list."""
    if not isinstance(iterable, (list, tuple)) or isinstance(start, Traced) or start != 0:
        raise CannotConvert("only sums of a list that start with 0 are known.")
    return Conversion(SumModule(), tuple(iterable))


PAIR = ((3, 4), (3, 4))
MASK = torch.tensor([[1.0, 0.0, 2.0], [-1.0, 0.5, 0.0]])

RULES = (
    Addition(
        SumModule,
        functions=reading(add, torch.add, T.add, T.__add__, T.__radd__, operator.add)
        | reading(sub, torch.sub, torch.subtract, T.sub, T.subtract, T.__sub__, operator.sub)
        | reading(swapped(sub), torch.rsub, T.__rsub__)
        | reading(builtin_sum, sum),
        examples=(
            case(SumModule, shape=(3, 4)),
            case(SumModule, shapes=PAIR),
            case(SumModule, shapes=((2, 2, 3), (2, 2, 3), (2, 2, 3))),
            case(SumModule, weights=(1.0, -1.0), shapes=PAIR),
            case(SumModule, shapes=((2, 1, 3), (2, 2, 3))),
            case(SumModule, weights=(1.0, -0.5), shapes=((2, 2, 3), (2, 2, 1))),
        ),
    ),
    Scaling(
        ScaleModule,
        Shift,
        examples=(
            case(ScaleModule, shape=(3, 4)),
            case(ScaleModule, weight=-0.3, shape=(2, 3, 4)),
            case(ScaleModule, MASK, shape=(2, 2, 3)),
            case(ScaleModule, MASK, shape=(2, 1, 3)),
            case(ScaleModule, MASK[None], shape=(2, 2, 3)),
            case(Shift, 1.5, shape=(3, 4)),
            case(Shift, MASK, weight=-1.0, shape=(2, 2, 1)),
        ),
    ),
)
