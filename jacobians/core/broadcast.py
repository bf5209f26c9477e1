"""Operands of different shapes: broadcasting behind the batch axis, its transpose, and what it binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bpk.jacobians.core.binding import Axis, Binding


def lifted(x: Tensor, axes: int, lead: int = 1) -> Tensor:
    """`[*lead, *in]` with so many axes behind `lead` (a view): those of `*in` are the last ones, as in PyTorch."""
    return x.reshape(*x.shape[:lead], *(1,) * (axes + lead - x.dim()), *x.shape[lead:])


def spread(x: Tensor, shape: Sequence[int], lead: int = 1) -> Tensor:
    """Repeat `[*lead, *in]` to `[*lead, *out]` (a view): axes of `*in` are the last ones of `*out`, as in PyTorch."""
    if x.shape[lead:] == tuple(shape):
        return x
    return lifted(x, len(shape), lead).expand(*x.shape[:lead], *shape)


def collect(x: Tensor, shape: Sequence[int], lead: int = 1) -> Tensor:
    """The transpose of `spread`: sum `[*lead, *out]` over what was repeated, `[*lead, *in]`."""
    if x.shape[lead:] == tuple(shape):
        return x
    missing = x.dim() - lead - len(shape)
    axes = [*range(lead, lead + missing)]
    axes += [k for k, size in enumerate(shape, lead + missing) if size == 1 and x.shape[k] != 1]
    return (x.sum(axes, keepdim=True) if axes else x).reshape(*x.shape[:lead], *shape)


def bind_operands(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Binding:
    """Operands that reach the batch axis have one, the others (fewer axes, or a single entry there) are shared.

    Numbers count as operands that all samples share.
    """
    given = [*args, *kwargs.values()]
    like = next(x for x in given if isinstance(x, Tensor))
    tensors = [x if isinstance(x, Tensor) else like.new_tensor(float(x)) for x in given]
    dims = max(x.dim() for x in tensors)
    if not dims:
        return Binding(module, ())  # numbers of no sample are left to autograd
    batch = max(x.shape[0] for x in tensors if x.dim() == dims)
    axes: list[Axis] = []
    for k, x in enumerate(tensors):
        if x.dim() == dims and x.shape[0] == batch:
            axes.append(0)
            continue
        axes.append(None)
        if x.dim() == dims and not x.requires_grad:
            tensors[k] = x[0]
        elif x.dim() == dims:
            return Binding(module, ())  # all samples share what depends on parameters: the same
    return Binding(module, tuple(tensors), tuple(axes) if None in axes else ())
