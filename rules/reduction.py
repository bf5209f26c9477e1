"""Linear maps along axes behind the batch axis: means and sums, rotation, repetition of entries."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import (
    CannotConvert,
    Conversion,
    behind_batch,
    one_by_one,
    reading,
    require_constant,
)
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import LinearMap
from bpk.jacobians.rule import Rule

T = torch.Tensor
Axes = int | tuple[int, ...]


# ---- the layers --------------------------------------------------------------------------------------
def mean(x: Tensor, /, dim: Axes, keepdim: bool = False) -> Tensor:
    """The mean over axes, `out = x.mean(dim)`."""
    return x.mean(dim, keepdim)


def add_over(x: Tensor, /, dim: Axes, keepdim: bool = False) -> Tensor:
    """The sum over axes, `out = x.sum(dim)`."""
    return x.sum(dim, keepdim)


def cumulate(x: Tensor, /, dim: int) -> Tensor:
    """The running sum along an axis, `out = x.cumsum(dim)`."""
    return x.cumsum(dim)


def roll(x: Tensor, /, shifts: Axes, dims: Axes) -> Tensor:
    """Rotate entries along axes, `out = x.roll(shifts, dims)`."""
    return x.roll(shifts, dims)


def flip(x: Tensor, /, dims: Axes) -> Tensor:
    """Reverse axes, `out = x.flip(dims)`."""
    return x.flip(dims)


def repeat_each(x: Tensor, /, repeats: int, dim: int) -> Tensor:
    """Repeat every entry along an axis, `out = x.repeat_interleave(repeats, dim)`."""
    return x.repeat_interleave(repeats, dim)


Mean = layer("Mean", mean, home="reduction")
Sum = layer("Sum", add_over, home="reduction")
Cumsum = layer("Cumsum", cumulate, home="reduction")
Roll = layer("Roll", roll, home="reduction")
Flip = layer("Flip", flip, home="reduction")
RepeatInterleave = layer("RepeatInterleave", repeat_each, home="reduction")


# ---- the rules ---------------------------------------------------------------------------------------
class AlongAxes(LinearMap):
    """A linear map along axes that its options name (`axis_option`)."""

    def __init__(self, *modules: type[nn.Module], axes_of: Callable[[Options], Axes], **others: Any) -> None:
        super().__init__(*modules, **others)
        self.axes_of = axes_of

    def _dims(self, call: Call) -> list[int]:
        dims, count = self.axes_of(call.options), call.inputs[0].dim()
        return [d % count for d in ((dims,) if isinstance(dims, int) else dims)]

    def acts_on(self, call: Call) -> int | None:
        return call.inputs[0].dim() - min(self._dims(call), default=0)

    def obstacle(self, call: Call) -> str | None:
        if min(self._dims(call), default=0) == 0:
            return "it acts on the batch axis, so that rows of its output are not samples"
        return None


class Reduction(AlongAxes):
    """`out = factor * sum over axes`: the transposed Jacobian repeats."""

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        dims, shape = self._dims(call), call.inputs[0].shape
        if not call.options.keepdim:
            for d in sorted(dims):
                mat = mat.unsqueeze(d + 1)
        if isinstance(call.options, Mean):
            mat = mat / torch.Size(shape[d] for d in dims).numel()
        return mat.expand(mat.shape[0], *shape)


# ---- how functions are read --------------------------------------------------------------------------
def axes(dim: Any) -> Axes:
    """Axes that are known, and are not the batch axis."""
    if dim is None or dim == () or dim == []:
        raise CannotConvert("without an axis it acts on the batch axis, too.")
    return tuple(behind_batch(d) for d in dim) if isinstance(dim, (tuple, list)) else behind_batch(dim)


def same_dtype(dtype: Any) -> None:
    """Refuse functions that change the precision."""
    if dtype is not None:
        raise CannotConvert("it changes the precision.")


def read_mean(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Conversion:
    """`input.mean(dim, keepdim)`."""
    same_dtype(dtype)
    return Conversion(Mean(axes(dim), keepdim), (input,))


def read_sum(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Conversion:
    """`input.sum(dim, keepdim)`."""
    same_dtype(dtype)
    return Conversion(Sum(axes(dim), keepdim), (input,))


def read_cumsum(input: Any, dim: Any, *, dtype: Any = None) -> Conversion:
    """`input.cumsum(dim)`."""
    same_dtype(dtype)
    return Conversion(Cumsum(behind_batch(dim)), (input,))


def read_roll(input: Any, shifts: Any, dims: Any = None) -> Conversion:
    """`input.roll(shifts, dims)`."""
    require_constant("the shift", shifts)
    return Conversion(Roll(shifts, axes(dims)), (input,))


def read_repeat_each(input: Any, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Conversion:
    """`input.repeat_interleave(repeats, dim)`."""
    if not isinstance(repeats, int):
        raise CannotConvert("its numbers of repetitions are not one number.")
    return Conversion(RepeatInterleave(repeats, axes(dim)), (input,))


RULES: tuple[Rule, ...] = (
    Reduction(
        Mean,
        axes_of=attrgetter("dim"),
        functions=reading(read_mean, torch.mean, T.mean),
        examples=(
            case(Mean, 1, shape=(2, 3, 2)),
            case(Mean, (-1, -2), shape=(2, 2, 2, 3)),
            case(Mean, -1, keepdim=True, shape=(2, 2, 3)),
        ),
    ),
    Reduction(
        Sum,
        axes_of=attrgetter("dim"),
        functions=reading(read_sum, torch.sum, T.sum),
        examples=(case(Sum, 1, shape=(2, 3, 2)), case(Sum, (1, 3), True, shape=(2, 2, 2, 3))),
    ),
    AlongAxes(
        Cumsum,
        axes_of=attrgetter("dim"),
        functions=reading(read_cumsum, torch.cumsum, T.cumsum),
        examples=(case(Cumsum, 1, shape=(2, 3, 2)), case(Cumsum, -1, shape=(3, 4))),
    ),
    AlongAxes(
        Roll,
        axes_of=attrgetter("dims"),
        functions=reading(read_roll, torch.roll, T.roll),
        examples=(case(Roll, 1, 1, shape=(3, 4)), case(Roll, (1, -1), (1, 2), shape=(2, 2, 3))),
    ),
    AlongAxes(
        Flip,
        axes_of=attrgetter("dims"),
        functions=reading(lambda input, *dims: Conversion(Flip(axes(one_by_one(dims))), (input,)), torch.flip, T.flip),
        examples=(case(Flip, (1,), shape=(3, 4)), case(Flip, (-1, 1), shape=(2, 2, 3))),
    ),
    AlongAxes(
        RepeatInterleave,
        axes_of=attrgetter("dim"),
        functions=reading(read_repeat_each, torch.repeat_interleave, T.repeat_interleave),
        examples=(case(RepeatInterleave, 2, 1, shape=(2, 2, 3)), case(RepeatInterleave, 3, -1, shape=(3, 2))),
    ),
)
