"""Which sample does each entry of a prediction belong to? Found by exchanging inputs, without any gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bpk.verification.problem import Arguments

UNKNOWN = -1


class SamplesMix(Exception):
    """An entry of the prediction depends on several samples; the message says so."""


def owners(predict: Callable[[Arguments], Tensor], inputs: Arguments, pred: Tensor, n: int) -> Tensor:
    """`[entries]`: the sample that each entry of the prediction belongs to.

    For every binary digit of the samples' numbers, those that have it are replaced by their neighbours, then those that
    do not. An entry that belongs to one sample changes in one of both cases.

    Raises:
        SamplesMix: If an entry changes in both cases.
    """
    number = torch.arange(n, device=pred.device)
    owner = torch.zeros(pred.numel(), dtype=torch.long, device=pred.device)
    unknown = torch.zeros(pred.numel(), dtype=torch.bool, device=pred.device)
    for k in range((n - 1).bit_length()):
        has = (number >> k) & 1 == 1
        one, other = (changed(predict(inputs.exchanged(chosen)), pred) for chosen in (has, ~has))
        if (one & other).any():
            raise SamplesMix("samples mix: entries of the prediction depend on several of them")
        owner += one.long() << k
        unknown |= ~(one | other)
    owner[unknown] = UNKNOWN
    return completed(owner.reshape(pred.shape), n).flatten()


def changed(found: Tensor, pred: Tensor) -> Tensor:
    """Which entries differ by more than rounding."""
    if found.shape != pred.shape:
        raise SamplesMix("samples mix: the shape of the prediction depends on their values")
    pred = pred.detach()
    scale = float(pred.abs().nan_to_num(0.0, 0.0, 0.0).max()) if pred.numel() else 0.0
    same = torch.isclose(found, pred, rtol=0, atol=1e3 * torch.finfo(pred.dtype).eps * scale, equal_nan=True)
    return ~same.flatten()


def completed(owner: Tensor, n: int) -> Tensor:
    """Entries that nothing changed (equal inputs, NaN) belong to the sample of their row along the batch axis."""
    unknown = owner == UNKNOWN
    if not unknown.any():
        return owner
    for axis in range(owner.dim()):
        rows = owner.movedim(axis, 0).flatten(1)
        highest = rows.max(1).values
        known = rows != UNKNOWN
        if known.any(1).all() and (~known | (rows == highest[:, None])).all():
            shape = [-1 if a == axis else 1 for a in range(owner.dim())]
            return torch.where(unknown, highest.reshape(shape), owner)
    if owner.dim() and len(owner) % n == 0:
        row = torch.arange(len(owner), device=owner.device) // (len(owner) // n)
        return torch.where(unknown, row.reshape(-1, *[1] * (owner.dim() - 1)), owner)
    raise SamplesMix("it cannot be found out which sample the entries of the prediction belong to")
