"""Samples that a model was given one after the other, in a list or in calls, and not along an axis; steps likewise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bpk.plan.samples.given import are_words, calls_of_models, free_axes, is_given_data, known_sizes
from bpk.plan.sources import Sources
from bpk.recording.record import Record


def are_listed(above: Iterable[Record], n: int) -> bool:
    """Whether a model may have been given a list of `n` samples, such as images `[C, H, W]`, or bags `[T, D]`.

    As many tensors `[1, n]` as the only sample has steps (three words, with labels and a mask) are none, if a layer
    reads one of them as it is: it would read all of a list.
    """
    records = list(above)
    for given in {record.given for record in records}:
        if len(given) != n or len(given[0]) == 0 or len({(len(shape), shape[-1:]) for shape in given}) > 1:
            continue
        readers = [record for record in records if is_given_data(record)]
        often = Counter(id(record.module) for record in readers)
        alone = [r for r in readers if r.inputs[0].shape[:2] == (1, n)] if given[0] == (1, n) else []
        read = {id(record.module) for record in alone}
        if not read or any(often[module] == n for module in read):
            return True
    return False


def are_joined(above: Sequence[Record], n: int) -> bool:
    """Whether `n` samples may have been given in parts, to calls of a model, or in a list to one.

    Each layer that knows its batch axis sees all of them then, or each call of it some: one sentence after the other
    (`torch.cat([model(x) for x in sentences])`), or those of each length (`model([short, long])`).
    """
    if {sum(sizes) for sizes in known_sizes(above) if any(size % n for size in sizes)} != {n}:
        return False
    given = calls_of_models(above)
    if len(given) != 1:
        reading = {id(record.given) for record in above if is_given_data(record)}
        return sum(shapes[0][0] for shapes in given if shapes[0] and (not reading or id(shapes) in reading)) == n
    if are_words(given[0]):
        return True
    return len(given[0]) == n or (len(given[0]) > 1 and sum(shape[0] for shape in given[0] if shape) == n)


def alternate(records: Iterable[Record], rows: Mapping[Record, Tensor]) -> bool:
    """Whether each of several samples of a call that knows its batch axis would be next to those of other calls.

    They are the same samples then, seen several times: rows `[N, K]`, as one axis, of `K` calls.
    """
    parts = [record for record in records if record.knows_batch and record in rows]
    for record in parts:
        calls = sum(other.module is record.module for other in parts)
        found, number = rows[record].cpu(), torch.arange(record.batch_size, device="cpu")
        if calls > 1 and record.batch_size > 1 and torch.equal(found, found[0] + calls * number):
            return True
    return False


def steps_come_first(calls: Iterable[Record], sources: Sources) -> bool:
    """Whether a model goes through the first axis of what it was given step by step: `for x_t in x: h = cell(x_t, h)`.

    Calls of a layer feed each other then, and each has as many rows as are along the second axis. Layers that are used
    again in depth may see steps first, too, and still have the axis of samples behind.
    """
    passed = defaultdict[int, list[Record]](list)
    for record in calls:
        first = record.given[0] if record.given else ()
        if len(first) > 1 and first[0] != first[1] == record.batch_size and not free_axes(record):
            passed[id(record.module)].append(record)
    return any(
        not {*each}.isdisjoint(sources.upstream(last)) for each in passed.values() for last in (each[0], each[-1])
    )


def one_by_one(root: Record, above: list[Record]) -> bool:
    """Whether a layer is given data as often as the root has rows, one row at a time: then these may be samples."""
    return root.batch_size in calls_of_one_row(above).values()


def are_nodes(root: Record, above: list[Record]) -> bool:
    """Whether a layer is given data more often, and so many tensors of one row were given: nodes of trees, say."""
    given, n = {record.given for record in above if record.given}, root.batch_size
    alike = all(len(shapes) > n and len({*shapes}) == 1 and shapes[0][:1] == (1,) for shapes in given)
    return n > 1 and bool(given) and alike and max(calls_of_one_row(above).values(), default=0) > n


def calls_of_one_row(above: Iterable[Record]) -> Counter[int]:
    """By `id` of a layer, how often it is given one row of data."""
    return Counter(id(r.module) for r in above if is_given_data(r) and r.batch_size == 1)
