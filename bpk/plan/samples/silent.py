"""Calls to some of whose rows no gradient comes, as behind a ReLU that is zero: their samples are where their
neighbours' are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from bpk.plan.samples.decoding import decode
from bpk.plan.samples.findings import may_be_in
from bpk.plan.sources import Sources
from bpk.recording.record import Record


def follow_neighbours(
    silent: Mapping[Record, Tensor],
    records: Sequence[Record],
    sources: Sources,
    found: dict[Record, Tensor],
    n: int,
    tolerance: float,
) -> None:
    """Move the batch axis of such calls to the front, and note whose their rows are.

    A call has its samples where the one has them whose result it is given as it is, or which is given its own, unless
    the gradients that have come to it (those of `silent`) say otherwise.
    """
    waiting = {record for record in silent if not record.shifted}
    before = -1
    while waiting and len(waiting) != before:
        before = len(waiting)
        for record in tuple(waiting):
            for other, axis in neighbours(record, records, sources):
                rows = found.get(other)
                if other in waiting or rows is None:
                    continue
                if agrees(record, silent[record], axis, rows, n, tolerance):
                    record.shift(axis)
                    found[record] = rows
                    waiting.discard(record)
                    break


def neighbours(record: Record, records: Sequence[Record], sources: Sources) -> Iterator[tuple[Record, int]]:
    """The calls that a call is next to, with the batch axis of the tensor that they share."""
    for source in sources[record].values():
        for producer, (_, number) in source.targets if source.stretch is None else ():
            yield producer, producer.out_axis(producer.places[number])
    for consumer in records:
        for index, source in sources[consumer].items():
            if source.stretch is None and source.targets[0][0] is record:
                yield consumer, consumer.axis(index)


def agrees(record: Record, mat: Tensor, axis: int, rows: Tensor, n: int, tolerance: float) -> bool:
    """Whether the batch axis of a call may be this one, with these rows, as far as gradients have come to it."""
    if not may_be_in(record, axis):
        return False
    if record.inputs[0].shape[axis] != len(rows) or mat.shape[1 + axis] != len(rows):
        return False
    seen = decode(mat.movedim(1 + axis, 1), n, tolerance, in_order=False)
    return seen is not None and bool(((seen < 0) | (seen == rows)).all())
