"""What functions between layers make of carriers: by rules, by linearity, or by nested forward mode.

Functions that work in place get a new value, unless another tensor looks at the same memory.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from inspect import signature
from traceback import walk_stack
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.forward import rules
from bpk.forward.carrier import (
    Carrier,
    carriers,
    differentiable,
    held,
    is_constant,
    occurrences,
    replaced,
    require_unchanged,
    start_of,
    transformed,
    values,
    versions_of,
    without_constants,
)
from bpk.forward.independence import stays_apart
from bpk.jacobians.core.conversion import CannotConvert, name_of, signature_of
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.series import Series
from bpk.jacobians.second_order.fused import Composed
from bpk.jacobians.second_order.nested import again, coefficients

T = torch.Tensor

CONSTANT = {T.detach, torch.detach, T.data.__get__, T.item, T.tolist, T.numpy, T.__array__}  # type: ignore[attr-defined]
"""Functions whose results autograd does not differentiate."""

REQUIRES_GRAD = T.requires_grad.__get__  # type: ignore[attr-defined]
"""Whether a tensor depends on what is differentiated."""

REFUSED = {T.backward, T.requires_grad_, T.retain_grad, T.register_hook, torch.autograd.grad, torch.autograd.backward}
"""Functions that ask autograd's graph, which carriers have none of."""

AFFINE = {
    *(T.view, T.reshape, torch.reshape, T.flatten, torch.flatten, T.unflatten, T.transpose, torch.transpose),
    *(T.permute, torch.permute, T.movedim, torch.movedim, T.squeeze, torch.squeeze, T.unsqueeze, torch.unsqueeze),
    *(T.expand, T.repeat, T.__getitem__, T.contiguous, T.clone, T.to, T.float, T.double, T.chunk, torch.chunk),
    *(T.split, torch.split, T.unbind, torch.unbind, T.sum, torch.sum, T.mean, torch.mean, T.type_as),
    *(T.__iter__, F.linear, F.conv1d, F.conv2d, F.conv3d, F.pad, T.neg, T.__neg__, torch.neg),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, T.view_as, T.reshape_as, T.expand_as, T.t),
}
"""Functions that are affine in any one of their arguments."""

PRODUCTS = {
    *(T.matmul, T.__matmul__, T.__rmatmul__, torch.matmul, operator.matmul, T.bmm, torch.bmm, T.mm, torch.mm),
    *(T.mul, T.__mul__, T.__rmul__, torch.mul, torch.einsum, T.mv, torch.mv, torch.addmm, torch.baddbmm),
}
"""Functions that are linear in each argument."""


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives where some of its arguments are carriers."""
    moving = carriers((args, kwargs))
    propagation = moving[0].propagation
    if any(c.propagation is not propagation for c in moving):
        raise refused(func, "it joins tensors of two propagations.", "ask for one order inside of another by taylor().")
    if is_transformed() and not propagation.transformed:
        raise UnsupportedLayer(transformed())
    if func == REQUIRES_GRAD:  # who is told that there is nothing to differentiate goes on with zeros
        return any(c.series.value.requires_grad or not is_constant(c.series) for c in moving)
    if func in REFUSED:
        raise refused(func, "it asks for autograd's graph of what depends on x.", "leave such derivatives to bpk.")
    if func in CONSTANT or not torch.is_grad_enabled():  # `no_grad` within the model
        result = func(*values(args), **values(kwargs))
        own = None if torch.is_grad_enabled() or not differentiable(result) else function_of_users()
        if own is not None:
            why = "it is a torch.autograd.Function, whose derivative is what its backward pass says."
            raise refused(own, why, "write it with functions of torch.")
        propagation.note(result)
        return result
    with propagation.computing():
        if kwargs.get("out") is not None:
            raise refused(func, "it writes into a given tensor (out=).", "use its result.")
        pure = out_of_place(func, args, kwargs)
        if pure is None:
            return pure_answer(func, args, kwargs)
        return written(func, args[0] if args else None, pure_answer(*pure))


def pure_answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function that changes nothing gives."""
    first = carriers((args, kwargs))[0]
    propagation, device = first.propagation, first.series.value.device
    args, kwargs = without_constants((args, kwargs))
    moving = carriers((args, kwargs))
    if not moving:
        return held(propagation, first.series, func(*args, **kwargs))
    before = RandomState.now(device)
    versions = versions_of(moving)
    result = func(*values(args), **values(kwargs))
    require_unchanged(name_of(func), moving, versions)
    outputs = differentiable(result)
    if not outputs:
        return result
    drawn, alone = before.moved(), occurrences((args, kwargs)) == 1
    if not drawn and not (alone and func in AFFINE):
        found = rules.of_function(func, args, kwargs)
        if found is not None:
            rule, conversion = found
            ruled = rules.answer(propagation, rule, conversion.module, conversion.inputs, {}, result)
            if ruled is not None:
                return ruled

    def function(*xs: Tensor) -> tuple[Tensor, ...]:
        if drawn:
            before.restore()
        new = {id(c): x for c, x in zip(moving, xs, strict=True)}
        return tuple(differentiable(func(*replaced(args, new), **replaced(kwargs, new))))

    given = [c.series for c in moving]
    if not drawn and not (func in AFFINE and isinstance(args[0], Carrier)) and not depends(function, given):
        return held(propagation, given[0], result)  # made like an argument (`zeros_like`), and not of it
    if drawn:
        with before.again():
            if not all(torch.equal(a, b) for a, b in zip(again(function, given), outputs, strict=True)):
                raise refused(
                    func, "it draws other random numbers when it is called again.", "call eval() on the model."
                )
    affine = alone and (func in AFFINE or func in PRODUCTS)
    try:
        with before.again() if drawn else Composed():
            terms = coefficients(function, given, affine)
    except (RuntimeError, NotImplementedError) as error:
        raise refused(func, f"torch has no forward mode for it: {error}", "write it with other functions.") from error
    carried, apart = {}, not drawn and stays_apart(func, args, kwargs)
    for x, found_terms in zip(outputs, terms, strict=True):
        carried[id(x)] = propagation.carry(given[0].moved(x, found_terms), apart)
    return replaced(result, carried)


def function_of_users() -> type[torch.autograd.Function] | None:
    """The function with a backward pass of its own whose forward pass is running, if one is."""
    forward_passes = {
        kind.forward.__code__: kind
        for kind in subclasses(torch.autograd.Function)
        if isinstance(kind.forward, FunctionType)
    }
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe()))
    return next((forward_passes[code] for code in codes if code in forward_passes), None)


def subclasses(base: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    """All functions that descend from one."""
    for kind in base.__subclasses__():
        yield kind
        yield from subclasses(kind)


def depends(function: Callable[..., tuple[Tensor, ...]], given: Sequence[Series]) -> bool:
    """Whether any result of a function has a derivative in what it is given."""
    if is_transformed() or any(s.value.is_inference() for s in given):
        return True
    with torch.enable_grad():
        return any(x.requires_grad for x in function(*(s.value.detach().requires_grad_() for s in given)))


def out_of_place(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The call that gives what a call in place writes; `None` where a function changes nothing."""
    name = name_of(func)
    if inplace_argument(func, args, kwargs):
        bound = signature_of(func).bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        return func, bound.args, bound.kwargs
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):

        def changed(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            copy = x.clone()
            func(copy, *rest, **named)
            return copy

        return changed, args, kwargs
    return None


@cache
def takes_inplace(func: Any) -> bool:
    """Whether a function has an argument `inplace`."""
    try:
        return "inplace" in signature(func).parameters
    except (TypeError, ValueError):
        return False


def inplace_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function is asked to work in place."""
    if not takes_inplace(func):
        return False
    try:
        return bool(signature_of(func).bind(*args, **kwargs).arguments.get("inplace", False))
    except (TypeError, CannotConvert):
        return False


def written(func: Any, target: Any, result: Any) -> Any:
    """Give a carrier the value that a function writes into it."""
    if not isinstance(target, Carrier):
        why = "it writes what depends on x into a tensor that does not."
        raise refused(
            func, why, "write y = y + x in place of y += x, and torch.stack or torch.cat in place of y[k] = x."
        )
    if is_transformed():
        why = "it works in place, and inside of a transform of torch.func memory cannot be compared."
        raise refused(func, why, "work out of place.")
    storage = target.series.value.untyped_storage()
    memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    others = [other.series.value for other in list(target.propagation.alive.values()) if other is not target]
    if any(start_of(x) in memory for x in (*others, *target.propagation.taken_out())):
        raise refused(func, "another tensor looks at the memory that it writes to (a view).", "work out of place.")
    if isinstance(result, Carrier):
        target.series, target.apart = result.series, result.apart
    else:
        target.series, target.apart = target.series.constant(result), True
    return target


def refused(func: Any, why: str, do: str) -> UnsupportedLayer:
    """Why coefficients cannot pass a function."""
    return UnsupportedLayer(f"Taylor coefficients cannot pass {name_of(func)}.", why, do)
