"""Other orders of axes: products are permuted views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import CannotConvert, Conversion, behind_batch, one_by_one, reading, require_constant
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import Copying
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def permute(x: Tensor, /, *dims: int, init_transpose: bool = False) -> Tensor:
    """Change the order of axes, `out = x.permute(dims)`, or swap two, `out = x.transpose(*dims)` (`init_transpose`)."""
    order = permutation(x.dim(), dims, init_transpose)
    if order and order[0] != 0:
        raise value_error(
            f"Permute{dims} moves the batch axis of an input with {x.dim()} axes.",
            "axis 0 holds the samples, and every result needs to know where they are.",
            "keep axis 0 in front, such as Permute(0, 2, 1), or call x.permute(...) in a forward of your own.",
        )
    return x.permute(order)


def permutation(count: int, dims: Sequence[int], init_transpose: bool) -> tuple[int, ...]:
    """Which axis of the input becomes each axis of the output."""
    if not init_transpose:
        return tuple(d % count for d in dims)
    order = list(range(count))
    first, second = (d % count for d in dims)
    order[first], order[second] = second, first
    return tuple(order)


def move_axis(x: Tensor, /, source: Any, destination: Any) -> Tensor:
    """Move axes to other places, `out = x.movedim(source, destination)`."""
    return x.movedim(source, destination)


Permute = layer("Permute", permute, home="permute")
MoveDim = layer("MoveDim", move_axis, home="permute")


# ---- the rules ---------------------------------------------------------------------------------------
class Permuting(Copying):
    """`out = x.permute(order)`: both products permute the axes of the columns."""

    def __init__(
        self, *modules: type[nn.Module], order: Callable[[Options, int], Sequence[int]], **others: Any
    ) -> None:
        super().__init__(*modules, **others)
        self.order = order

    def acts_on(self, call: Call) -> int | None:
        order = self._order(call)
        kept = next((k for k, axis in enumerate(order) if k != axis), len(order))
        return len(order) - kept if kept else None

    def obstacle(self, call: Call) -> str | None:
        return "it moves the batch axis" if self._order(call)[0] != 0 else None

    def _order(self, call: Call) -> Sequence[int]:
        return self.order(call.options, call.inputs[0].dim())

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat.permute(0, *(axis + 1 for axis in self._order(call)))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        order = self._order(call)
        return mat.permute(0, *(order.index(axis) + 1 for axis in range(len(order))))

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """Rows and columns in another order."""
        places = torch.arange(len(matrix), device=matrix.device).reshape(1, 1, *call.output.shape[1:])
        back = self.jac_t_mat_prod(call, places).flatten()
        return matrix[back][:, back]


def order_of_permute(options: Options, count: int) -> Sequence[int]:
    """The order that `Permute` asks for."""
    return permutation(count, options.dims, options.init_transpose)


def order_of_move(options: Options, count: int) -> Sequence[int]:
    """The order that `MoveDim` asks for."""
    axes = torch.empty(tuple(range(count)), device="meta")  # an axis is known by its length
    return tuple(axes.movedim(options.source, options.destination).shape)


# ---- how functions are read --------------------------------------------------------------------------
def read_permute(input: Any, *dims: Any) -> Conversion:
    """`input.permute(dims)`."""
    order = one_by_one(dims)
    require_constant("the order of axes", *order)
    if order[0] not in (0, -len(order)):
        raise CannotConvert("it moves the batch axis.")
    return Conversion(Permute(*order), (input,))


def read_transpose(input: Any, dim0: Any, dim1: Any) -> Conversion:
    """`input.transpose(dim0, dim1)`."""
    if dim0 == dim1:
        return Conversion(nn.Identity(), (input,))
    return Conversion(Permute(behind_batch(dim0), behind_batch(dim1), init_transpose=True), (input,))


def read_t(input: Any) -> Conversion:
    """`input.t()`."""
    raise CannotConvert("it moves the batch axis.")


def read_movedim(input: Any, source: Any, destination: Any) -> Conversion:
    """`input.movedim(source, destination)`."""
    for dims in (source, destination):
        for dim in dims if isinstance(dims, (tuple, list)) else (dims,):
            behind_batch(dim)
    return Conversion(MoveDim(source, destination), (input,))


RULES: tuple[Rule, ...] = (
    Permuting(
        Permute,
        order=order_of_permute,
        functions=reading(read_permute, torch.permute, T.permute)
        | reading(read_transpose, torch.transpose, T.transpose, torch.swapdims, T.swapdims)
        | reading(lambda input, axis0, axis1: read_transpose(input, axis0, axis1), torch.swapaxes, T.swapaxes)
        | reading(lambda input: read_transpose(input, -2, -1), torch.adjoint, T.adjoint)
        | reading(read_t, torch.t, T.t),
        examples=(
            case(Permute, 0, 2, 1, shape=(2, 3, 2)),
            case(Permute, 0, 3, 1, 2, shape=(2, 1, 2, 3)),
            case(Permute, -1, 1, init_transpose=True, shape=(2, 3, 1, 2)),
        ),
    ),
    Permuting(
        MoveDim,
        order=order_of_move,
        functions=reading(read_movedim, torch.movedim, T.movedim, torch.moveaxis, T.moveaxis),
        examples=(case(MoveDim, 1, -1, shape=(2, 3, 1, 2)), case(MoveDim, (1, 2), (2, 3), shape=(2, 3, 1, 2))),
    ),
)
