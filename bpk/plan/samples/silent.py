"""Calls that no gradient comes to, as behind a ReLU that is zero everywhere: their samples are where their neighbours'
are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from bpk.plan.samples.probing import SourcesOf
from bpk.recording.record import Record


def follow_neighbours(
    silent: set[Record], records: Sequence[Record], sources: SourcesOf, found: dict[int, Tensor]
) -> None:
    """Move the batch axis of such calls to the front, and note whose their rows are.

    A call has its samples where the one has them whose result it is given as it is, or which is given its own.
    """
    before = -1
    while silent and len(silent) != before:
        before = len(silent)
        for record in tuple(silent):
            for other, axis in neighbours(record, records, sources):
                rows = found.get(id(other))
                if other not in silent and rows is not None and has_axis(record, axis, len(rows)):
                    record.shift(axis)
                    found[id(record)] = rows
                    silent.discard(record)
                    break


def neighbours(record: Record, records: Sequence[Record], sources: SourcesOf) -> Iterator[tuple[Record, int]]:
    """The calls that a call is next to, with the batch axis of the tensor that they share."""
    for source in sources[id(record)].values():
        for producer, (_, number) in source.targets if source.stretch is None else ():
            yield producer, producer.out_axis(producer.places[number])
    for consumer in records:
        for index, source in sources[id(consumer)].items():
            if source.stretch is None and source.targets[0][0] is record:
                yield consumer, consumer.axis(index)


def has_axis(record: Record, axis: int, size: int) -> bool:
    """Whether the batch axis of a call may be this one."""
    looks_at = None if record.rule is None else record.rule.acts_on(record.call())
    shape = record.inputs[0].shape
    return looks_at is not None and axis < len(shape) - looks_at and shape[axis] == size
