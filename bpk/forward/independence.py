"""Do samples stay apart? What follows from a function and its arguments, and a test by columns for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.forward.carrier import Carrier
from bpk.jacobians.core.indices import puts_lists_in_front
from bpk.jacobians.core.series import Term
from bpk.jacobians.core.side_by_side import as_rows

T = torch.Tensor

ALONG = {
    *(T.prod, torch.prod, T.sum, torch.sum, T.mean, torch.mean, T.var, torch.var, T.std, torch.std, T.norm, torch.norm),
    *(T.amax, torch.amax, T.amin, torch.amin, T.cumsum, torch.cumsum, T.cumprod, torch.cumprod, F.normalize),
    *(T.logsumexp, torch.logsumexp, torch.linalg.vector_norm, T.unsqueeze, torch.unsqueeze, T.squeeze, torch.squeeze),
    *(T.softmax, torch.softmax, F.softmax, F.log_softmax, T.chunk, torch.chunk, T.split, torch.split, T.unbind),
}
"""Functions of the axes that their argument `dim` names."""

CONVOLUTIONS = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}
"""Functions of one sample each where their input has so many axes."""

PLACE = {
    **dict.fromkeys((T.chunk, torch.chunk, T.split, torch.split), 2),
    **dict.fromkeys((T.norm, torch.norm, torch.linalg.vector_norm, F.normalize), 2),
}
"""At which place `dim` is given without its name, if not right behind the tensor."""

BASE = 4
"""Samples are told apart by the digits of their numbers (few digits: squares of large powers overflow in float16)."""


def stays_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether each row of the result depends on the same row of the only carrier, which is the first argument."""
    x = args[0] if args else None
    if not isinstance(x, Carrier) or not x.apart or any(isinstance(a, Carrier) for a in args[1:]):
        return False
    dims = x.series.value.dim()
    if func in CONVOLUTIONS:
        return dims == CONVOLUTIONS[func]
    if func is F.linear:
        return dims > 1
    if func in (T.matmul, T.__matmul__, torch.matmul, T.mm, torch.mm):
        return dims > 1 and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() <= 2
    if func is T.__getitem__:
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return isinstance(first, slice) and first == slice(None) and not puts_lists_in_front(args[1])
    if func not in ALONG:
        return False
    place = PLACE.get(func, 1)
    axes = kwargs["dim"] if "dim" in kwargs else args[place] if len(args) > place else None
    listed = list(axes) if isinstance(axes, (tuple, list)) else [axes]
    counted = dims + (func in (T.unsqueeze, torch.unsqueeze))  # from behind, in the result
    return bool(listed) and all(isinstance(axis, int) and axis + counted * (axis < 0) > 0 for axis in listed)


def columns_of_samples(x: Tensor) -> tuple[Tensor, Tensor]:
    """Directions `[B, N, *in]`, and weights `[B, N]` of samples, any two of which differ in a row.

    They are powers of two, with which products are exact.
    """
    rows = max(3, math.ceil(math.log(max(2, len(x)), BASE)))
    numbers = torch.arange(len(x), device=x.device)
    digits = torch.stack([numbers // BASE ** (k % rows) % BASE for k in range(rows)])
    return torch.randn(rows, *x.shape, dtype=x.dtype, device=x.device), torch.exp2(digits.to(x.dtype))


def agree(along: Sequence[Term], weights: Tensor) -> bool:
    """Whether each `c_k` `[2 B, N, *out]`, along columns `v` and then `w v`, is `w^k` times as large there."""
    size = weights.new_zeros(weights.shape[1])
    for k, c in enumerate(along, start=1):
        if c is None or not c.numel():
            continue
        plain, weighted = as_rows(c, 2).chunk(2)
        # of each sample, in any column: one alone may cancel, as higher coefficients may but for rounding
        size = torch.maximum(size, plain.abs().amax((0, 2)))
        error = (weighted / weights[..., None] ** k - plain).abs().amax((0, 2))
        if not bool((error <= torch.finfo(plain.dtype).eps ** 0.5 * size).all()):
            return False
    return True
