"""What speaks against the samples that were found, or for others as well: the user is told."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

import torch
from torch import nn

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.samples.cautions import AXES, ROWS, TOLD, tell
from bpk.plan.samples.checking import check_hypothesis
from bpk.plan.samples.findings import NotInFront
from bpk.plan.samples.given import calls_of_models, is_whole
from bpk.plan.samples.hypotheses import all_numberings
from bpk.plan.samples.placement import Placement
from bpk.recording.record import Record

MOST = 1 << 12
"""Of so many rows, other orders are tried."""

LOOKED_AT: WeakKeyDictionary[nn.Module, set[tuple[int, ...]]] = WeakKeyDictionary()
"""By loss: how many samples and rows there were, and of which shapes calls, where nothing was to be told."""

MANY = 64
"""So many of them are looked at: it takes time, and on a GPU waits for it."""


def caution_contradictions(found: Placement) -> None:
    """Tell the user once where the first axis of the data speaks against what was found, or nothing for its order.

    No hypothesis was that of the data (the model has split the batch axis, say, and put others in between), or several
    were. Where the loss has a row for each sample, these may be groups of what the model was given (bags, graphs).
    """
    root, calls, n = found.root, found.calls, found.n
    if n < 2 or root.batch_size <= n or any(root.module in told for told in (AXES, ROWS, TOLD)):
        return
    given = [shapes for shapes in calls_of_models(calls) if shapes[0]]
    if len(given) != 1 or any(record.knows_batch for record in calls):
        return
    shape, *others = given[0]
    if any(len(other) == len(shape) for other in others) or not is_new(found):  # parts of a batch, as a list
        return
    against = [record for record in calls if speaks_against(record, found, shape)]
    if shape[0] != n or against:
        seen = f": {against[-1].where} has others there" if against and shape[0] == n else ""
        why = f"along the first axis of what the model was given, there are {shape[0]} rows{seen}."
    elif not any(is_anchor(record, shape) for record in calls) and others_agree(found):
        why = "functions in front of all layers rearrange data, and others agree with the graph as well."
    else:
        return
    what = f"That the {root.batch_size} rows of '{root.path}' are those of {n} samples is a guess, or which are whose."
    tell(TOLD, root, what, why, "keep the batch axis first and whole.")


def is_new(found: Placement) -> bool:
    """Whether nothing of these shapes was looked at before; it is noted."""
    known = LOOKED_AT.setdefault(found.root.module, set())
    shapes = (size for record in found.calls for x in record.inputs[:1] for size in x.shape)
    key = (found.n, found.root.batch_size, *shapes)
    if key in known or len(known) >= MANY:
        return False
    known.add(key)
    return True


def speaks_against(record: Record, found: Placement, shape: torch.Size) -> bool:
    """Whether a call sees the first axes of data, or a part of the first one, and has other samples there."""
    if not record.inputs or record.problem:
        return False
    seen, rows = record.inputs[0].shape, found.rows.get(record)
    if record.data_axis == 0 and record.shifted:
        return True
    if record.reads_data and record.reads_piece:
        return bool(record.shifted) and len(seen) == len(shape) and seen[1:] == shape[1:] and seen[0] < shape[0]
    if record.shifted or rows is None:
        return False
    if is_whole(record) and record.data_axis == 0 and len(rows) in accumulate(shape[1:], mul, initial=shape[0]):
        number = torch.arange(len(rows), device=rows.device)  # axes as one, that of samples in front
        return bool(((rows >= 0) & (rows != number // (len(rows) // shape[0]))).any())
    known = rows[rows >= 0]
    return sees_first_axes(record, shape) and len(known.unique()) < len(known)


def is_anchor(record: Record, shape: torch.Size) -> bool:
    """Whether a call reads all data, or sees their first axes."""
    return is_whole(record) or (bool(record.inputs) and sees_first_axes(record, shape))


def sees_first_axes(record: Record, shape: torch.Size) -> bool:
    """Whether the first two axes (or the only one) of what a call sees are as long as those of data."""
    first = min(2, len(shape))
    return record.inputs[0].shape[:first] == shape[:first]


def others_agree(found: Placement) -> bool:
    """Whether the rows of the root may be shared out among as many samples in another way."""
    root, n = found.root, found.n
    if root.batch_size > MOST:
        return False
    here = found.rows.get(root, torch.arange(root.batch_size)).cpu()
    axes = {record: record.shifted for record in found.above}
    try:
        for numbers in all_numberings(root.batch_size, n):
            if not torch.equal(numbers, here) and agrees(found, numbers):
                return True
    finally:
        for record, axis in axes.items():
            record.shift(axis)
    return False


def agrees(found: Placement, numbers: torch.Tensor) -> bool:
    """Whether the graph agrees with these samples of the rows of the root."""
    found.put_back()
    try:
        check_hypothesis(found, False, numbers, found.n, movable=True)
    except UnsupportedLayer:
        return False
    except NotInFront:
        pass
    return True
