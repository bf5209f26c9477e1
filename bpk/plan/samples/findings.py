"""What is found at calls while a hypothesis about samples is tested, if it is not simply a sample for each row."""

from __future__ import annotations

from bpk.recording.record import Record


class Shared(Exception):
    """A call whose rows feed several samples: it may have no batch axis."""


class Inside(Exception):
    """A function whose rows feed several samples, and each entry of a row one of them: they are along a later axis."""


class NotInFront(Exception):
    """Layers are to be left to autograd: their rules need the batch axis in front, and it is elsewhere or missing.

    `missing` says how many have none under a hypothesis, `certain` whether others, which are given data, have one.
    """

    def __init__(self, records: list[Record], missing: int = 0, certain: bool = False) -> None:
        super().__init__(", ".join(record.path for record in records))
        self.records = records
        self.missing = missing
        self.certain = certain


class LastResort(NotInFront):
    """Rows of layers without parameters feed several samples, but entries of these rows may feed one each."""


class AllInside(NotInFront):
    """Functions have the samples inside of their rows, and everything else agrees with the hypothesis."""


def put_back(axes: list[tuple[Record, int]]) -> None:
    """Move batch axes to where they had been."""
    for record, axis in axes:
        record.shift(axis)
