"""Parameters that were changed between a layer's call and the backward pass: the values that the layer used are gone.

Autograd notices a change in place where it has kept the parameter itself. It keeps no bias of a recurrent layer or of
attention, which their rules evaluate once more, and it cannot notice `p.data = other`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from bpk.jacobians.core.errors import explain
from bpk.jacobians.core.nested import tensors_in

Stamp = tuple[int, int | torch.SymInt, tuple[int, ...], UntypedStorage] | None
"""The version of a tensor, and where its values are in which memory (which nobody else gets meanwhile)."""


def stamp(x: Tensor) -> Stamp:
    """What tells later whether a tensor still has its values; `None` where it has no memory of its own."""
    try:
        return x._version, x.storage_offset(), x.stride(), x.untyped_storage()
    except RuntimeError:  # it is sparse, of one of `torch.func`'s transforms, or made in inference mode
        return None


def is_changed(x: Tensor, known: Stamp) -> bool:
    """Whether a tensor was changed in place since, or has got other memory (`p.data = other`)."""
    if known is None:
        return False
    version, start, strides, memory = known
    moved = x.storage_offset() != start or x.stride() != strides or x.untyped_storage() is not memory
    return moved or x._version != version


def changed(params: Mapping[str, Tensor], stamps: Sequence[Stamp]) -> list[str]:
    """The parameters of a call that were changed since."""
    if list(map(stamp, params.values())) == stamps:  # which says nothing of those that have no memory of their own
        return []
    return [name for name, known in zip(params, stamps, strict=False) if is_changed(params[name], known)]


class Changed(Tensor):
    """Stands in for a changed parameter: it has a shape, and whoever reads its values gets an error.

    A rule that does not read them (a linear layer's that of its bias, say) need not know. What reads memory without
    asking finds NaN.
    """

    message: str

    @classmethod
    def of(cls, where: str, name: str, param: Tensor) -> Changed:
        """In the place of a parameter, buffer or argument of the layer that is called so (`where_is`)."""
        numbers = param.is_floating_point() or param.is_complex()
        made = torch.full_like(param, torch.nan if numbers else 0, requires_grad=False).as_subclass(cls)
        made.message = explain(
            f"'{name}' of {where} was changed after the layer had used it.",
            "the Jacobian would be computed from the wrong values.",
            "change it (optimizer.step(), load_state_dict, p.data = ...) after the backward pass.",
        )
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what concerns the shape, and refuse all else."""
        named = dict(kwargs or {})
        changed = next(x for x in tensors_in([*args, *named.values()]) if isinstance(x, Changed))
        if func in KEPT:
            made = super().__torch_function__(func, types, args, named)
            made.message = changed.message
            return made
        if func in OF_SHAPE:
            found = super().__torch_function__(func, types, args, named)
            return found.as_subclass(Tensor) if isinstance(found, Changed) else found
        raise RuntimeError(changed.message)


KEPT = (
    *(Tensor.detach, Tensor.to, Tensor.float, Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten),
    *(Tensor.transpose, Tensor.permute, Tensor.movedim, Tensor.squeeze, Tensor.unsqueeze, Tensor.expand),
    *(Tensor.__getitem__, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))),
)
"""Functions that return entries of the same parameter."""

GETTERS = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "_version")

OF_SHAPE = (
    *(getattr(Tensor, name).__get__ for name in GETTERS),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.stride, Tensor.is_contiguous, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.new_zeros, Tensor.new_empty, Tensor.new_ones),
    *(Tensor.untyped_storage, torch.empty_like, torch.zeros_like, torch.ones_like),
)
"""Functions that do not read values."""
