"""What was proven of a graph holds in one of other sizes, where the same follows from its form.

Batches of sentences have another length each time, and the last batch of an epoch has fewer samples. To look for
samples by gradients takes as long as a few passes. So where a graph of the same layers and functions is known, its
answer is carried over: as many samples as rows of the root, or as the model was given, with the rows of the root in the
same order. That is taken if it follows from the new graph's form, whatever the values are; else samples are looked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bpk.recording.record import Record


@dataclass(frozen=True)
class Arrangement:
    """Where samples are, whatever their number: the batch axis of each call, and the order of the root's rows.

    Rows are the samples in order, or those of one sample come side by side (`in_front`), or all samples come again and
    again; then these are as many as what the model was given has rows.
    """

    axes: tuple[int, ...]
    in_order: bool
    in_front: bool

    def numbers(self, records: Sequence[Record]) -> tuple[int, Tensor] | None:
        """The number of samples, and the sample of each row of the last call (`None`: they cannot be so arranged)."""
        rows = records[-1].batch_size
        n = rows if self.in_order else number_given(records)
        if n is None or n < 2 or rows % n or len(self.axes) != len(records):
            return None
        number = torch.arange(rows)
        return n, number // (rows // n) if self.in_front else number % n


def arrangement_of(records: Sequence[Record], axes: tuple[int, ...], n: int, rows: Tensor | None) -> Arrangement | None:
    """How `n` samples are arranged, from the sample of each row of the last call (`None`: that says nothing of others).

    Data with as many steps as samples say less than others.
    """
    if n < 2 or any(len(shape) > 1 and shape[0] == shape[1] for record in records[:-1] for shape in record.given[:1]):
        return None
    if rows is None:
        return Arrangement(axes, in_order=True, in_front=True)
    if n != number_given(records) or len(rows) <= n:
        return None
    for in_front in (True, False):
        found = Arrangement(axes, False, in_front)
        numbered = found.numbers(records)
        if numbered is not None and torch.equal(numbered[1], rows.cpu()):
            return found
    return None


def number_given(records: Sequence[Record]) -> int | None:
    """How many rows the first tensor has that the model behind the last call was given, if it was called once."""
    shapes = {record.given for record in records[:-1] if record.given}
    first = next(iter(shapes))[0] if len(shapes) == 1 else torch.Size()
    return first[0] if first else None


def without_sizes(form: Any) -> Hashable:
    """The form of a graph (see `form_of`) with the number of axes in place of their sizes."""
    details, calls = form
    return "any size", details, tuple([call_without_sizes(*call) for call in calls])


def call_without_sizes(
    module: Hashable,
    rule: Hashable,
    training: Hashable,
    given: Sequence[torch.Size],
    data_axis: Hashable,
    reads_data: Hashable,
    mixes: Hashable,
    shapes: Sequence[torch.Size],
    axes: Hashable,
    *fed: Sequence[Any],
) -> Hashable:
    """One call of it. What the functions between calls are told of sizes goes, too: the proof looks at them."""
    sources = list[Hashable]()
    for source in fed:
        index, stretch = source[0], source[1]
        if len(source) == 2 and stretch is not None:
            nr, functions = stretch
            stretch = nr, tuple([(kind, *connected) for kind, _, _, *connected in functions])
        sources.append((index, stretch, *source[2:]))
    dims = tuple([len(shape) for shape in given]), tuple([len(shape) for shape in shapes])
    return module, rule, training, dims, data_axis, reads_data, mixes, axes, *sources
