"""Samples repeated along their axes, and entries replaced by a fixed value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.broadcast import collect
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Size, one_by_one, reading, require_constant
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import Copying
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def expand(x: Tensor, /, *sizes: int) -> Tensor:
    """Repeat axes with one entry (as a view), `out = x.expand(N, *sizes)`."""
    return x.expand(x.shape[0], *sizes)


def repeat(x: Tensor, /, *sizes: int) -> Tensor:
    """Repeat every sample along its axes, `out = x.repeat(1, *sizes)`."""
    return x.repeat(1, *sizes)


def masked_fill(x: Tensor, /, mask: Tensor, value: float) -> Tensor:
    """Put a fixed value where a fixed mask is true, `out = x.masked_fill(mask, value)`."""
    return x.masked_fill(mask, value)


Expand = layer("Expand", expand, home="reduction")
Repeat = layer("Repeat", repeat, home="reduction")
MaskedFill = layer("MaskedFill", masked_fill, home="reduction")


# ---- the rules ---------------------------------------------------------------------------------------
class Repeating(Copying):
    """`Repeat` and `Expand`, where they keep the number of axes."""

    def obstacle(self, call: Call) -> str | None:
        if call.inputs[0].dim() != call.output.dim():
            return "it adds axes in front of the batch axis"
        return None


class Expanding(Repeating):
    """`out = x` repeated along axes with one entry: the transposed Jacobian sums over them."""

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat.expand(mat.shape[0], *call.output.shape)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return collect(mat, call.inputs[0].shape[1:], 2)


class Masking(Copying):
    """`MaskedFill`: entries under the mask do not depend on the input."""

    def obstacle(self, call: Call) -> str | None:
        mask, x = call.options.mask, call.inputs[0]
        if call.output.dim() != x.dim() or (mask.dim() == x.dim() and mask.shape[0] != 1):
            return "its fixed mask differs between samples"
        return None


def mask_linear(options: Options, x: Tensor) -> Tensor:
    """Masking without the constant."""
    return x.masked_fill(options.mask, 0.0)


# ---- how functions are read --------------------------------------------------------------------------
def read_expand(input: Any, *sizes: Any) -> Conversion:
    """`input.expand(input.size(0), ...)`."""
    first, *others = one_by_one(sizes) or (0,)  # of a number, which has no sizes
    if not isinstance(first, Size) and first != -1:
        raise CannotConvert("its first size is not known to be that of the batch axis (write x.size(0) or -1 there).")
    require_constant("a size", *others)
    return Conversion(Expand(*others), (input,))


def read_repeat(input: Any, *repeats: Any) -> Conversion:
    """`input.repeat(1, ...)`."""
    first, *others = one_by_one(repeats) or (0,)
    require_constant("a number of repetitions", first, *others)
    if first != 1:
        raise CannotConvert("it repeats the samples.")
    return Conversion(Repeat(*others), (input,))


def read_masked_fill(input: Any, mask: Any, value: Any) -> Conversion:
    """`input.masked_fill(mask, value)` with a fixed mask."""
    require_constant("the mask or the value", mask, value)
    return Conversion(MaskedFill(mask, float(value)), (input,))


MASK = torch.tensor([[True, False, False], [False, False, True]])

RULES: tuple[Rule, ...] = (
    Expanding(
        Expand,
        functions=reading(read_expand, T.expand),
        examples=(case(Expand, 3, -1, shape=(2, 1, 2)), case(Expand, 2, shape=(3, 1))),
    ),
    Repeating(
        Repeat,
        functions=reading(read_repeat, T.repeat),
        examples=(case(Repeat, 2, 1, shape=(2, 2, 3)), case(Repeat, 3, shape=(3, 2))),
    ),
    Masking(
        MaskedFill,
        linear=mask_linear,
        functions=reading(read_masked_fill, torch.masked_fill, T.masked_fill),
        examples=(case(MaskedFill, MASK, -2.0, shape=(2, 2, 3)), case(MaskedFill, MASK, 0.0, shape=(2, 1, 3))),
    ),
)
