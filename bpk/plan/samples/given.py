"""What a model was given, and which calls see that: the samples should be along its first axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor, nn

from bpk.recording.data import Given
from bpk.recording.record import Record


def calls_of_models(above: Iterable[Record]) -> list[Given]:
    """What models were given, once for each of their calls."""
    return list({id(record.given): record.given for record in above if record.given}.values())


def of_what_was_given(root: Record, above: list[Record]) -> list[tuple[int, bool, bool]]:
    """Hypotheses that a model has as many samples as its first tensor has rows, to be tried before all others.

    There are none unless it was called once, and was given fewer rows than the root has: steps of time, say, that its
    forward pass looks at one by one are no samples then.
    """
    given = calls_of_models(above)
    rows = [shape[0] for shapes in given for shape in shapes if shape]
    if len(given) != 1 or not rows or rows[0] == 1:
        return []
    if sum(rows) >= root.batch_size and not may_be_merged(root, above):  # rows of several tensors, one behind another
        return []
    first = next(shape for shapes in given for shape in shapes if shape)
    if not all(may_have(sizes, first) for sizes in known_sizes(above)):
        return []
    return [(rows[0], movable, in_front) for movable in (False, True) for in_front in (True, False)]


def may_be_merged(root: Record, above: Iterable[Record]) -> bool:
    """Whether the rows of the root may be two axes of what the model was given, the first one that of samples, as one.

    Calls that are given data of so many rows have no axis behind then. Of numbers, unlike words, the last axis are
    features, which are not merged.
    """
    calls = [record for record in above if record.batch_size == root.batch_size and is_given_data(record)]
    if any(free_axes(record) != () for record in calls):
        return False
    behind = any(record.inputs[0].is_floating_point() for record in calls)
    return any(
        len(shape) > 1 + behind and shape[0] < root.batch_size == shape[0] * shape[1]
        for record in calls
        for shape in record.given
    )


def known_sizes(above: Iterable[Record]) -> Iterable[list[int]]:
    """The batch sizes in all calls of each layer that knows its batch axis."""
    found: dict[nn.Module, list[int]] = {}
    for record in above:
        if record.knows_batch:
            found.setdefault(record.module, []).append(record.batch_size)
    return found.values()


def may_have(sizes: Sequence[int], first: torch.Size) -> bool:
    """Whether there may be so many samples as a model's first tensor has rows, where a layer sees such batches.

    Each is of all samples, or they are pieces of the batch. Steps of one sample (`[T, 1]`) are no pieces.
    """
    n = first[0]
    return all(size % n == 0 for size in sizes) or (sum(sizes) == n and not (first[1:2] == (1,) and {*sizes} == {1}))


def is_told(root: Record, above: Iterable[Record]) -> bool:
    """Whether the root has a row for each row of what the model was given."""
    return {shapes[0][:1] for shapes in {record.given for record in above} if shapes} == {(root.batch_size,)}


def rows_in_order(above: list[Record], rows: Mapping[Record, Tensor], n: int) -> bool:
    """Whether calls that are given data have the samples in order, in rows or groups of rows, or some or one of them.

    As many rows as are behind the first axis of what the model was given are those of one index along that axis. Rows
    that were picked from data (tokens sent to an expert) are those of any samples.
    """
    told = any(map(is_whole, above))
    for record in above:
        if record not in rows or may_be_picked(record, told):
            continue
        if not is_laid_out_as_given(record, rows[record].cpu(), n, told):
            return False
        if is_given_data(record) and record.batch_size:
            found, count = rows[record].cpu(), record.batch_size
            behind = accumulate(record.given[0][1:], mul) if record.given else ()
            orders = [torch.arange(count, device="cpu") // max(count // n, 1), torch.arange(count, device="cpu") % n]
            one_index = count != n and count in behind and not is_as_large_as_given(record) and not is_whole(record)
            orders = [] if one_index else orders
            orders += [found.max().expand(count)] if count != n or record.data_axis else []
            sliced = record.reads_piece and record.inputs[0].dim() == len(record.given[0]) and count < n
            orders += [found[0] + torch.arange(count, device="cpu")] if sliced else []
            if not any(bool(((found < 0) | (found == order)).all()) for order in orders):
                return False
    return True


def may_be_picked(record: Record, told: bool) -> bool:
    """Whether a call that is given data may see some rows of it, in any order: they are in a memory of their own.

    It has no axis behind its rows then. As many rows as the first two axes of data have are these, unless it is `told`
    where samples are: by another call, which reads all of the data.
    """
    if not is_given_data(record) or is_of_data(record):
        return False
    if free_axes(record) != ():
        return False
    return told or not is_as_large_as_given(record)


def is_laid_out_as_given(record: Record, found: Tensor, n: int, told: bool) -> bool:
    """Whether a call that sees the first axes of what the model was given, maybe as one, has samples along the first.

    It need not be given data itself: a parameter may have been added to it. Of another tensor that the model was given
    (nodes beside the matrix of a graph) the rows are no groups of samples, either. Where it is `told` where samples
    are, as many rows as both axes have may be any (those that experts have room for).
    """
    if len(found) == n or not record.inputs:
        return True
    seen, last, first = record.inputs[0].shape, max(1, record.shifted) + 1, record.given[0] if record.given else ()
    if any(len(given) > 1 and seen[:last] == given[:last] for given in record.given):
        return False
    if told or record.shifted or len(first) < 2 or len(found) != first[0] * first[1]:
        return True
    number = torch.arange(len(found), device="cpu")
    return any(bool(((found < 0) | (found == order)).all()) for order in (number // first[1], number % n))


def is_as_large_as_given(record: Record) -> bool:
    """Whether a call sees as many rows as the first two axes of what the model was given have: no table has those."""
    first = record.given[0][:2] if record.given else torch.Size()
    return len(first) == 2 and min(first) > 1 and record.batch_size == first[0] * first[1]


def is_laid_out_like_given(record: Record, n: int) -> bool:
    """Whether a call sees `n` rows in the first axes of a tensor that the model was given: a copy of it, maybe.

    Tables of positions see steps in front. Where there are as many as samples, nothing is said.
    """
    seen = record.inputs[0].shape[:2]
    if seen[:1] != (n,) or seen == (n, n):
        return False
    return seen in [given[:2] for given in record.given] and len(seen) == min(2, max(map(len, record.given)))


def are_words(given: Sequence[torch.Size]) -> bool:
    """Whether a model may have been given sentences, each as its words; those of a single word are not noted."""
    return len(given) > 1 and all(len(shape) == 1 for shape in given)


def is_like_one_of(record: Record, n: int) -> bool:
    """Whether a call sees as much as one of the `n` tensors that the model was given, one for each sample: a sentence.

    Each sample has calls of its own then, which are of no other.
    """
    seen = [size for size in record.inputs[0].shape if size != 1]
    alike = any(seen == [size for size in shape if size != 1] for shape in record.given)
    return alike or not seen if are_words(record.given) else alike and len(record.given) == n


def axis_of_data(record: Record) -> int | None:
    """Along which axis a call has the samples of data, as far as that can be seen where shapes do not tell.

    What functions of data have made is taken to be laid out as data is, where nothing says otherwise. Not so rows with
    no axis behind that are as long: they may have been picked.
    """
    if record.knows_batch or not record.given or not is_given_data(record):
        return None
    alike = len(record.given[0]) > 1 and record.inputs[0].shape[:2] == record.given[0][:2]
    return 0 if record.data_axis is None and alike and free_axes(record) != () else record.data_axis


def follows_data(record: Record, rows: Tensor, n: int) -> bool:
    """Whether a call has samples along the first axis of what the model was given, as far as that can be seen.

    Its rows are said to be these samples; those that have none (-1) say nothing.
    """
    if is_whole(record) and has_them_behind(record, n):
        return False
    axis = axis_of_data(record)
    if axis is None or n != record.given[0][0]:
        return True
    steps, count = record.given[0][1], record.batch_size
    tells = rows >= 0
    found, number = rows[tells], torch.arange(len(rows), device=rows.device)[tells]
    if record.reads_piece and axis:  # steps of one sample
        return len(found.unique()) <= 1
    merged = sorted(record.inputs[0].shape) != sorted(record.given[0])  # an axis behind may be as long as both together
    if merged and count == n * steps:
        return torch.equal(found, number % n if axis else number // steps)
    in_order = len(rows) != n or torch.equal(found.sort().values, number)  # in any order: the model may have moved them
    return in_order and (record.reads_piece or record.shifted == axis)


def has_them_behind(record: Record, n: int) -> bool:
    """Whether as many as there are samples are along the second axis of data, and others, that count as rows, in front.

    Where steps do not reach each other (a state that is set back), rows may look like those of samples all the same.
    """
    kept = bool(record.given) and record.inputs[0].shape[:2] == record.given[0][:2]
    return kept and not record.shifted and record.batch_size != n and (free_axes(record) or ())[:1] == (n,)


def is_of_data(record: Record) -> bool:
    """Whether a call reads the data of the model, as far as that can be seen: a part of it, a view or a copy."""
    return record.reads_data or record.data_axis is not None


def free_axes(record: Record) -> torch.Size | None:
    """The sizes of axes, behind the first, that a layer treats one by one (`None`: not known)."""
    looks_at = record.rule.acts_on(record.call()) if record.rule is not None else None
    shape = record.inputs[0].shape
    return None if looks_at is None else shape[1 : len(shape) - looks_at]


def is_whole(record: Record) -> bool:
    """Whether a call reads the data of the model, and no part of it."""
    return is_of_data(record) and not record.reads_piece


def is_given_data(record: Record) -> bool:
    """Whether a call's inputs depend on no parameter."""
    return bool(record.inputs) and all(node is None for node, _ in record.edges)
