"""Layers that only change the shape: the Jacobian is the identity, products are views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.conversion import (
    CannotConvert,
    Conversion,
    Size,
    behind_batch,
    one_by_one,
    reading,
    require_constant,
)
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import Reshaping
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def reshape(x: Tensor, /, *shape: int, first: int | None = None) -> Tensor:
    """Give every sample another shape, `out = x.reshape(N, *shape)`; `first` in place of `N` is taken as it is."""
    return x.reshape(x.shape[0] if first is None else first, *shape)


def squeeze(x: Tensor, /, dim: int | tuple[int, ...]) -> Tensor:
    """Drop axes with one entry, `out = x.squeeze(dim)`."""
    return x.squeeze(dim)


def unsqueeze(x: Tensor, /, dim: int) -> Tensor:
    """Insert an axis with one entry, `out = x.unsqueeze(dim)`."""
    return x.unsqueeze(dim)


Reshape = layer("Reshape", reshape, home="shape")
Squeeze = layer("Squeeze", squeeze, home="shape")
Unsqueeze = layer("Unsqueeze", unsqueeze, home="shape")


# ---- the rules ---------------------------------------------------------------------------------------
class Flattening(Reshaping):
    """`Flatten` over axes behind the batch axis; merging samples with anything else is refused."""

    def acts_on(self, call: Call) -> int | None:
        dims = max(1, call.inputs[0].dim())
        return dims - call.options.start_dim % dims

    def obstacle(self, call: Call) -> str | None:
        dims = max(1, call.inputs[0].dim())
        first, last = call.options.start_dim % dims, call.options.end_dim % dims
        if first == 0 and last > 0:
            return "it merges the batch axis with others, so that rows of its output are not samples"
        return None


class Unflattening(Reshaping):
    """`Unflatten` of an axis behind the batch axis; splitting the samples is refused."""

    def acts_on(self, call: Call) -> int | None:
        dims = call.inputs[0].dim()
        return dims - call.options.dim % dims

    def obstacle(self, call: Call) -> str | None:
        if call.options.dim % call.inputs[0].dim() == 0:
            return "it splits the batch axis, so that rows of its output are not samples"
        return None


class Regrouping(Reshaping):
    """`Reshape` of every sample; a first size that is not that of the batch axis is refused."""

    def obstacle(self, call: Call) -> str | None:
        if call.output.shape[:1] != call.inputs[0].shape[:1]:
            return "it merges the batch axis with others, so that rows of its output are not samples"
        return None


class OneEntryAxes(Reshaping):
    """Axes with one entry that come or go behind the batch axis."""

    def obstacle(self, call: Call) -> str | None:
        dim, longer = call.options.dim, max(call.inputs[0].dim(), call.output.dim())
        dims = dim if isinstance(dim, tuple) else (dim,)
        return "it adds or drops the batch axis" if any(d % longer == 0 for d in dims) else None


# ---- how functions are read --------------------------------------------------------------------------
def keep(input: Any, *, memory_format: Any = None) -> Conversion:
    """`input.clone()`, `input.contiguous()`: nothing changes."""
    return Conversion(nn.Identity(), (input,))


def read_flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Conversion:
    """`input.flatten(start_dim, end_dim)`."""
    require_constant("an axis", start_dim, end_dim)
    if start_dim == 0 and end_dim != 0:
        raise CannotConvert("it merges the batch axis with others.")
    return Conversion(nn.Flatten(start_dim, end_dim), (input,))


def read_unflatten(input: Any, dim: Any, sizes: Any) -> Conversion:
    """`input.unflatten(dim, sizes)`."""
    require_constant("the sizes", sizes)
    return Conversion(nn.Unflatten(behind_batch(dim), tuple(sizes)), (input,))


def read_reshape(input: Any, *shape: Any) -> Conversion:
    """`input.reshape(input.size(0), ...)`; with a number (or -1) there, the model may merge the batch axis."""
    sizes = one_by_one(shape)
    if not sizes or not all(isinstance(size, int) for size in (0, *sizes[1:])):
        raise CannotConvert("a size behind the batch axis is computed by the model.")
    if isinstance(sizes[0], Size):
        return Conversion(Reshape(*sizes[1:]), (input,))
    if not isinstance(sizes[0], int):
        raise CannotConvert("its first size is not known to be that of the batch axis (write x.size(0) there).")
    return Conversion(Reshape(*sizes[1:], first=sizes[0]), (input,))


def read_squeeze(input: Any, *dim: Any) -> Conversion:
    """`input.squeeze(dim)`."""
    dims = one_by_one(dim)
    if not dims:
        raise CannotConvert("without an axis it may drop the batch axis, too.")
    dims = tuple(behind_batch(d) for d in dims)
    return Conversion(Squeeze(dims if len(dims) > 1 else dims[0]), (input,))


RULES: tuple[Rule, ...] = (
    Reshaping(
        nn.Identity,
        functions=reading(keep, torch.clone, T.clone, T.contiguous),
        examples=(case(nn.Identity, shape=(3, 4)), case(nn.Identity, shape=(2, 3, 1, 2))),
    ),
    Flattening(
        nn.Flatten,
        functions=reading(read_flatten, torch.flatten, T.flatten),
        examples=(
            case(nn.Flatten, shape=(3, 2, 3, 2)),
            case(nn.Flatten, shape=(3, 4)),
            case(nn.Flatten, 2, shape=(2, 3, 2, 2)),
            case(nn.Flatten, 1, 2, shape=(2, 3, 2, 2)),
            case(nn.Flatten, -2, shape=(2, 3, 2, 2)),
            case(nn.Flatten, start_dim=0, end_dim=0, shape=(3, 4)),
        ),
    ),
    Unflattening(
        nn.Unflatten,
        functions=reading(read_unflatten, torch.unflatten, T.unflatten),
        examples=(
            case(nn.Unflatten, 1, (2, 3), shape=(3, 6)),
            case(nn.Unflatten, -1, (2, -1), shape=(2, 3, 4)),
            case(nn.Unflatten, 1, (2, 1, 2), shape=(2, 4, 3)),
        ),
    ),
    Regrouping(
        Reshape,
        functions=reading(read_reshape, torch.reshape, T.reshape, T.view),
        examples=(
            case(Reshape, -1, shape=(2, 3, 2)),
            case(Reshape, 2, -1, shape=(2, 6)),
            case(Reshape, 3, first=-1, shape=(2, 3, 1)),
        ),
    ),
    OneEntryAxes(
        Squeeze,
        functions=reading(read_squeeze, torch.squeeze, T.squeeze),
        examples=(
            case(Squeeze, 1, shape=(2, 1, 3)),
            case(Squeeze, (1, -1), shape=(2, 1, 3, 1)),
            case(Squeeze, -1, shape=(2, 3)),
        ),
    ),
    OneEntryAxes(
        Unsqueeze,
        functions=reading(
            lambda input, dim: Conversion(Unsqueeze(behind_batch(dim)), (input,)), torch.unsqueeze, T.unsqueeze
        ),
        examples=(case(Unsqueeze, 1, shape=(2, 3)), case(Unsqueeze, -1, shape=(2, 3))),
    ),
)
