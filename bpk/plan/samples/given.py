"""What a model was given, and which calls see that: the samples should be along its first axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from bpk.plan.sources import Sources
from bpk.recording.record import Record


def of_what_was_given(root: Record, above: list[Record]) -> list[tuple[int, bool, bool]]:
    """Hypotheses that a model has as many samples as its first tensor has rows, to be tried before all others.

    There are none unless it was called once, and was given fewer rows than the root has: steps of time, say, that its
    forward pass looks at one by one are no samples then.
    """
    given = {id(record.given): record.given for record in above if record.given}
    rows = [shape[0] for shapes in given.values() for shape in shapes if shape]
    if len(given) != 1 or not rows or rows[0] == 1 or sum(rows) >= root.batch_size:
        return []
    if any(record.batch_size % rows[0] for record in above if record.knows_batch):
        return []
    return [(rows[0], movable, in_front) for movable in (False, True) for in_front in (True, False)]


def is_told(root: Record, above: Iterable[Record]) -> bool:
    """Whether the root has a row for each row of what the model was given."""
    return {shapes[0][:1] for shapes in {record.given for record in above} if shapes} == {(root.batch_size,)}


def rows_in_order(above: list[Record], rows: Mapping[Record, Tensor], n: int) -> bool:
    """Whether calls that are given data have the samples in order, in rows or groups of rows, or only one of them.

    As many rows as are behind the first axis of what the model was given are those of one index along that axis.
    """
    for record in above:
        if record in rows and not is_laid_out_as_given(record, rows[record].cpu(), n):
            return False
        if record in rows and is_given_data(record):
            found, count = rows[record].cpu(), record.batch_size
            behind = accumulate(record.given[0][1:], mul) if record.given else ()
            orders = [torch.arange(count) // max(count // n, 1), torch.arange(count) % n]
            orders = [] if count != n and count in behind else orders
            orders += [found.max().expand(count)] if count != n or record.turned else []
            if not any(bool(((found < 0) | (found == order)).all()) for order in orders):
                return False
    return True


def is_laid_out_as_given(record: Record, found: Tensor, n: int) -> bool:
    """Whether a call that sees the first axes of what the model was given, maybe as one, has samples along the first.

    It need not be given data itself: a parameter may have been added to it. Of another tensor that the model was given
    (nodes beside the matrix of a graph) the rows are no groups of samples, either.
    """
    if len(found) == n or not record.inputs:
        return True
    seen, last, first = record.inputs[0].shape, max(1, record.shifted) + 1, record.given[0] if record.given else ()
    if any(len(given) > 1 and seen[:last] == given[:last] for given in record.given):
        return False
    if record.shifted or len(first) < 2 or len(found) != first[0] * first[1]:
        return True
    number = torch.arange(len(found))
    return any(bool(((found < 0) | (found == order)).all()) for order in (number // first[1], number % n))


def is_as_large_as_given(record: Record) -> bool:
    """Whether a call sees as many rows as the first two axes of what the model was given have: no table has those."""
    first = record.given[0][:2] if record.given else torch.Size()
    return len(first) == 2 and min(first) > 1 and record.batch_size == first[0] * first[1]


def follows_data(record: Record, rows: Mapping[Record, Tensor], n: int, sources: Sources) -> bool:
    """Whether a call has samples along the first axis of what the model was given, as far as that can be seen."""
    if record.turned is None or sources.producers(record):
        return True
    (first, steps), count = record.given[0][:2], record.batch_size
    if count != first * steps:
        if record.reads_piece and record.turned:  # steps of one sample
            return record in rows and len(rows[record].unique()) == 1
        return count != n or bool(record.shifted) == record.turned
    number = torch.arange(count)
    found = rows[record].cpu() if record in rows else number
    return bool(((found < 0) | (found == (number % n if record.turned else number // steps))).all())


def is_given_data(record: Record) -> bool:
    """Whether a call's inputs depend on no parameter."""
    return bool(record.inputs) and all(node is None for node, _ in record.edges)
