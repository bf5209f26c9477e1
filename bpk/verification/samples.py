"""Which sample does each entry of a prediction belong to? Found by exchanging inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.second_order.stand_ins import StandIns
from bpk.verification.problem import Arguments

UNKNOWN = -1


class SamplesMix(Exception):
    """An entry of the prediction depends on several samples; the message says so."""


def rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """`F.rrelu` that draws a slope for each entry. Torch draws none for positive ones: others would get other draws."""
    slope = torch.empty_like(x).uniform_(lower, upper) if training else (lower + upper) / 2
    result = torch.where(x > 0, x, slope * x)
    return x.copy_(result) if inplace else result


SAME_DRAWS = {F.rrelu: rrelu}
"""By the function that they stand for: what is drawn for a sample does not depend on the values of others."""


class OtherShape(SamplesMix):
    """A prediction has another shape where samples are exchanged."""


def owners(predict: Callable[[Arguments], list[Tensor]], inputs: Arguments, n: int) -> list[Tensor]:
    """For each of the predictions, in its shape: the sample that each entry belongs to.

    For every binary digit of the samples' numbers, those that have it are replaced by their neighbours, then those that
    do not. An entry that belongs to one sample changes in one of both cases.

    Where masks decide about the shape of a prediction (`logits[mask]`), samples keep them.

    Raises:
        SamplesMix: If an entry changes in both cases, or inputs cannot be exchanged.
    """
    with StandIns(SAME_DRAWS):
        preds = values(predict, inputs)
        try:
            return with_neighbours(predict, inputs, preds, n, masks=True)
        except OtherShape:
            return with_neighbours(predict, inputs, preds, n, masks=False)


def with_neighbours(
    predict: Callable[[Arguments], list[Tensor]], inputs: Arguments, preds: Sequence[Tensor], n: int, masks: bool
) -> list[Tensor]:
    """The same, with the masks of neighbours or without."""
    number = torch.arange(n, device=preds[0].device)
    found = [torch.zeros(pred.shape, dtype=torch.long, device=pred.device) for pred in preds]
    unknown = [torch.zeros(pred.shape, dtype=torch.bool, device=pred.device) for pred in preds]
    for k in range((n - 1).bit_length()):
        has = (number >> k) & 1 == 1
        with_digit, without = [of_others(predict, inputs.exchanged(some, masks)) for some in (has, ~has)]
        if not len(with_digit) == len(without) == len(preds):
            raise SamplesMix("samples mix: the number of predictions depends on their values")
        for j, pred in enumerate(preds):
            one, other = changed(with_digit[j], pred), changed(without[j], pred)
            if (one & other).any():
                raise SamplesMix("samples mix: entries of the prediction depend on several of them")
            found[j] += one.long() << k
            unknown[j] |= ~(one | other)
    every = [completed(torch.where(where, UNKNOWN, owner), n) for where, owner in zip(unknown, found, strict=True)]
    return [in_order(owner, n) for owner in every]


def values(predict: Callable[[Arguments], list[Tensor]], inputs: Arguments) -> list[Tensor]:
    """Predictions without their graph, which is there meanwhile: models may ask for gradients themselves."""
    return [pred.detach() for pred in predict(inputs)]


def of_others(predict: Callable[[Arguments], list[Tensor]], inputs: Arguments) -> list[Tensor]:
    """The same of inputs that were exchanged, which the model need not take: edges of a graph, offsets of bags."""
    try:
        return values(predict, inputs)
    except Exception as error:  # whatever the user's model raises
        first = str(error).strip().split("\n")[0]
        reason = f"the model fails where inputs of samples are exchanged: {type(error).__name__}: {first}"
        raise SamplesMix(f"it cannot be found out which sample the predictions belong to ({reason})") from error


def changed(found: Tensor, pred: Tensor) -> Tensor:
    """Which entries differ by more than rounding."""
    if found.shape != pred.shape:
        raise OtherShape("samples mix: the shape of the prediction depends on their values")
    pred = pred.detach()
    scale = float(pred.abs().nan_to_num(0.0, 0.0, 0.0).max()) if pred.numel() else 0.0
    same = torch.isclose(found, pred, rtol=0, atol=1e3 * torch.finfo(pred.dtype).eps * scale, equal_nan=True)
    return ~same


def completed(owner: Tensor, n: int) -> Tensor:
    """Entries that nothing changed (equal inputs, NaN, all dropped) belong to the sample of their row.

    The batch axis is one along which rows belong to one sample each, all samples having some; else the first one, where
    that can be.
    """
    unknown = owner == UNKNOWN
    if not unknown.any():
        return owner
    by_axis = list(owners_by_axis(owner))
    if owner.dim() and len(owner) % n == 0:
        row = torch.arange(len(owner), device=owner.device) // (len(owner) // n)
        by_axis = [found for found in by_axis if len(found.unique()) == n] + [in_shape(row, owner, 0)]
    if not by_axis:
        raise SamplesMix("it cannot be found out which sample the entries of the prediction belong to")
    return torch.where(unknown, by_axis[0], owner)


def owners_by_axis(owner: Tensor) -> Iterator[Tensor]:
    """For each axis along which every row is known to belong to one sample: these, in a shape to be broadcast."""
    for axis in range(owner.dim()):
        rows = owner.movedim(axis, 0).reshape(owner.shape[axis], -1)
        highest = rows.max(1).values
        known = rows != UNKNOWN
        if known.any(1).all() and (~known | (rows == highest[:, None])).all():
            yield in_shape(highest, owner, axis)


def in_shape(rows: Tensor, like: Tensor, axis: int) -> Tensor:
    """Numbers along one axis of a tensor."""
    return rows.reshape([-1 if a == axis else 1 for a in range(like.dim())])


def in_order(owner: Tensor, n: int) -> Tensor:
    """Samples that the model has put in another order have the numbers of their rows: the loss knows no others.

    Only where all rows along an axis belong to one sample each, and samples are one after the other, or take turns.
    """
    for axis in range(owner.dim()):
        rows = owner.movedim(axis, 0).reshape(owner.shape[axis], -1)
        first = rows[:, 0]
        if len(first) % n or (rows != first[:, None]).any():
            continue
        repeats = len(first) // n
        for order, every in ((first[::repeats], first.reshape(n, -1)), (first[:n], first.reshape(-1, n).T)):
            if (every == order[:, None]).all() and len(order.unique()) == n:
                return order.argsort()[owner]
    return owner
