"""Picking: slices of tensors, and entries of tuples."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.conversion import CannotConvert, Conversion, reading, require_constant
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.core.indices import puts_lists_in_front
from bpk.jacobians.families.linear_map import Copying, Reshaping
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def keeps_batch(slice_info: Any) -> bool:
    """Whether an index leaves the batch axis in front, and whole."""
    first = slice_info[0] if isinstance(slice_info, tuple) and slice_info else slice_info
    if isinstance(first, slice):
        whole = first.start in (None, 0) and first.stop is None and first.step in (None, 1)
        return whole and not puts_lists_in_front(slice_info)
    return not puts_lists_in_front(slice_info) if first is Ellipsis else first == ()


def slicing(x: Tensor, /, slice_info: Any) -> Tensor:
    """Index behind the batch axis, `out = x[slice_info]`, such as `(slice(None), slice(2, 5))` for `x[:, 2:5]`."""
    if not keeps_batch(slice_info):
        raise value_error(
            f"Slicing({slice_info!r}) does not leave the batch axis whole.",
            "axis 0 holds the samples, and every result needs all of them.",
            "let the first entry be slice(None), such as Slicing((slice(None), 0)) for x[:, 0].",
        )
    return x[slice_info]


def reduce_tuple(values: Any, /, index: int = 0) -> Any:
    """One entry of a tuple, `out = values[index]`, such as the output of a recurrent layer without its state."""
    return values[index]


Slicing = layer("Slicing", slicing, home="slicing")
ReduceTuple = layer("ReduceTuple", reduce_tuple, home="reduce_tuple")


# ---- the rules ---------------------------------------------------------------------------------------
class Picking(Copying):
    """`out = x[slices]`: the transposed Jacobian writes into zeros."""

    def acts_on(self, call: Call) -> int | None:
        info = call.options.slice_info
        entries = info if isinstance(info, tuple) else (info,)
        whole = next((k for k, entry in enumerate(entries) if entry != slice(None)), len(entries))
        return call.inputs[0].dim() - whole if whole else None


class Element(Reshaping):
    """An entry of a tuple: the identity of that entry; a tuple inside the tuple just passes."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        (values,) = (*args, *kwargs.values())
        if isinstance(values, Tensor):
            return Binding(module, (values,), problem=ONE_ENTRY, do="use Slicing to pick behind the batch axis.")
        picked = values[module.index]
        return Binding(module, (picked,) if isinstance(picked, Tensor) else ())

    def acts_on(self, call: Call) -> int | None:
        return 0


ONE_ENTRY = "it was given a tensor instead of a tuple, and takes one entry along its first axis."


# ---- how functions are read --------------------------------------------------------------------------
def getitem(input: Any, index: Any, /) -> Conversion:
    """`input[index]`: a number picks from a tuple, slices from a tensor."""
    require_constant("the index", index)
    if isinstance(index, int) and not isinstance(index, bool):
        return Conversion(ReduceTuple(index), (input,))  # only the converter knows what is a tuple
    if not keeps_batch(index):
        raise CannotConvert("the index does not leave the batch axis whole.")
    return Conversion(Slicing(index), (input,))


def select(input: Any, dim: Any, index: Any) -> Conversion:
    """`input.select(dim, index)`: `input[:, ..., index]`."""
    require_constant("the index", index)
    return Conversion(Slicing(at_axis(dim, index)), (input,))


def narrow(input: Any, dim: Any, start: Any, length: Any) -> Conversion:
    """`input.narrow(dim, start, length)`."""
    require_constant("the range", start, length)
    stop = None if start < 0 and start + length == 0 else start + length
    return Conversion(Slicing(at_axis(dim, slice(start, stop))), (input,))


def index_select(input: Any, dim: Any, index: Any) -> Conversion:
    """`torch.index_select(input, dim, index)` with a fixed index."""
    require_constant("the index", index)
    return Conversion(Slicing(at_axis(dim, index.reshape(-1).tolist())), (input,))


def at_axis(dim: Any, entry: Any) -> tuple[Any, ...]:
    """The index that is `entry` at an axis behind the batch axis, and whole elsewhere."""
    require_constant("the axis", dim)
    if dim == 0:
        raise CannotConvert("it indexes the batch axis.")
    whole = slice(None)
    return (*(whole,) * dim, entry) if dim > 0 else (Ellipsis, entry, *(whole,) * (-dim - 1))


class FromPair(nn.Module):
    """`ReduceTuple` of a pair of tensors, for its examples."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.reduce = ReduceTuple(index)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce((x.detach(), x) if self.reduce.index in (1, -1) else (x, x.detach()))


WHOLE = slice(None)

RULES: tuple[Rule, ...] = (
    Picking(
        Slicing,
        functions=reading(getitem, operator.getitem, T.__getitem__)
        | reading(select, torch.select, T.select)
        | reading(narrow, torch.narrow, T.narrow)
        | reading(index_select, torch.index_select, T.index_select),
        examples=(
            case(Slicing, (WHOLE, slice(1, 3)), shape=(3, 4)),
            case(Slicing, (WHOLE, -1), shape=(2, 3, 2)),
            case(Slicing, (Ellipsis, 0), shape=(2, 3, 2)),
            case(Slicing, (WHOLE, None, slice(None, None, 2)), shape=(2, 4)),
            case(Slicing, (WHOLE, [2, 0, 0]), shape=(2, 3, 2)),
            case(Slicing, WHOLE, shape=(2, 3)),
        ),
    ),
    Element(ReduceTuple, examples=(case(FromPair, 0, shape=(3, 4)), case(FromPair, -1, shape=(2, 3, 2)))),
)
