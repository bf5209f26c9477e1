"""What a model was given, and which calls see that: the samples should be along its first axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from weakref import WeakSet

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import explain, warn
from bpk.recording.record import Record

CAUTIONED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told of a batch of one."""

TOLD: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that the axis of samples is a guess."""

PARTED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that others see other rows."""


def of_what_was_given(root: Record, above: list[Record]) -> list[tuple[int, bool, bool]]:
    """Hypotheses that a model has as many samples as its first tensor has rows, to be tried before all others.

    There are none unless it was called once, and was given fewer rows than the root has: steps of time, say, that its
    forward pass looks at one by one are no samples then.
    """
    given = {id(record.given): record.given for record in above if record.given}
    rows = [shape[0] for shapes in given.values() for shape in shapes if shape]
    if len(given) != 1 or not rows or rows[0] == 1 or sum(rows) >= root.batch_size:
        return []
    first = next(shape for shapes in given.values() for shape in shapes if shape)
    if not all(may_have(sizes, first) for sizes in known_sizes(above)):
        return []
    return [(rows[0], movable, in_front) for movable in (False, True) for in_front in (True, False)]


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


def caution_batch_of_one(root: Record, above: Sequence[Record], n: int) -> None:
    """Tell the user once where rows are taken for samples, and the model was given a single one.

    Functions have merged axes in front of all layers then; nothing tells samples from steps of one sample.
    """
    for record in above:
        if record.knows_batch or (record.given and record.given[0][:1] != (1,)):
            return
    given = [shape[0] for record in above for shape in record.given if shape]
    if n < 2 or not given or n in given or root.module in CAUTIONED:
        return
    CAUTIONED.add(root.module)
    warn(
        explain(
            f"The model was given one row, and the {n} rows of '{root.path}' are taken for samples.",
            "functions merge axes in front of all layers, and nothing tells whether these are samples or parts of one.",
            "give the model at least two samples, or merge axes behind its first layer.",
        )
    )


def caution_layout(root: Record, above: Sequence[Record], n: int, rows: Mapping[Record, Tensor]) -> None:
    """Tell the user once where samples and steps are as many, and nothing but a guess tells which rows are which.

    Functions were in front of all layers, and the rows of the loss are not grouped as data are: either they were put in
    another order behind the layers, or in front of them.
    """
    order = rows.get(root)
    if order is None or root.module in TOLD or bool((order.diff() >= 0).all()):
        return
    seen = [record for record in above if axis_of_data(record) is not None and record.given[0][:2] == (n, n)]
    if not seen or any(record.data_axis is not None for record in seen):
        return
    TOLD.add(root.module)
    warn(
        explain(
            f"The model was given {n} rows of {n}, and which of the two are samples behind functions of them is a "
            f"guess: along the first axis of the input of '{seen[-1].path}'.",
            f"the rows of '{root.path}' are in another order, so that one of the two was transposed.",
            "use a batch that is not as large as the second axis is long, or a layer in front of the functions.",
        )
    )


def caution_parts(losses: Mapping[Record, tuple[Sequence[Record], Mapping[Record, Tensor]]]) -> None:
    """Tell the user once where losses take different rows that the model was given for the same samples.

    That is right for several views of a sample in one batch, and not for parts of a batch; nothing tells which. Of each
    loss there are the calls behind it, from the last one to the first, and the samples of rows where these differ.
    """
    first: dict[Record, Tensor] = {}
    for loss, (above, rows) in losses.items():
        below = [r for r in above if r in rows and r.given and r.given[0][:1] == rows[r].shape]
        if not below or loss.module in PARTED:
            continue
        samples, known = rows[below[-1]], first.setdefault(below[-1], rows[below[-1]])
        if known is samples or bool(((samples >= 0) & (known >= 0)).any()):
            continue
        PARTED.add(loss.module)
        warn(
            explain(
                f"'{loss.path}' sees other rows than a loss before, of the {len(samples)} that the model was given.",
                "sample k of one loss counts as sample k of the other, as for two views of one sample, so that what "
                "belongs to a sample is a sum over several rows.",
                "if they are different samples, give all rows to one loss (to weight them: a loss module of your own), "
                "or use one backward pass for each loss.",
            )
        )


def is_told(root: Record, above: Iterable[Record]) -> bool:
    """Whether the root has a row for each row of what the model was given."""
    return {shapes[0][:1] for shapes in {record.given for record in above} if shapes} == {(root.batch_size,)}


def rows_in_order(above: list[Record], rows: Mapping[Record, Tensor], n: int) -> bool:
    """Whether calls that are given data have the samples in order, in rows or groups of rows, or some or one of them.

    As many rows as are behind the first axis of what the model was given are those of one index along that axis. Rows
    that were picked from data (tokens sent to an expert) are those of any samples.
    """
    told = any(is_of_data(record) and not record.reads_piece for record in above)
    for record in above:
        if record not in rows or may_be_picked(record, told):
            continue
        if not is_laid_out_as_given(record, rows[record].cpu(), n, told):
            return False
        if is_given_data(record) and record.batch_size:
            found, count = rows[record].cpu(), record.batch_size
            behind = accumulate(record.given[0][1:], mul) if record.given else ()
            orders = [torch.arange(count, device="cpu") // max(count // n, 1), torch.arange(count, device="cpu") % n]
            orders = [] if count != n and count in behind and not is_as_large_as_given(record) else orders
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


def axis_of_data(record: Record) -> int | None:
    """Along which axis a call has the samples of data, as far as that can be seen where shapes do not tell.

    What functions of data have made is taken to be laid out as data is, where nothing says otherwise. Not so rows with
    no axis behind that are as long: they may have been picked.
    """
    if record.knows_batch or not record.given or not is_given_data(record):
        return None
    alike = len(record.given[0]) > 1 and record.inputs[0].shape[:2] == record.given[0][:2]
    return 0 if record.data_axis is None and alike and free_axes(record) != () else record.data_axis


def follows_data(record: Record, rows: Tensor, known: Tensor, n: int) -> bool:
    """Whether a call has samples along the first axis of what the model was given, as far as that can be seen.

    Its rows are said to be these samples; those that are not `known`, having no gradient, say nothing.
    """
    axis = axis_of_data(record)
    if axis is None or n != record.given[0][0]:
        return True
    steps, count = record.given[0][1], record.batch_size
    tells = (rows >= 0) & known
    found, number = rows[tells], torch.arange(len(rows), device=rows.device)[tells]
    if record.reads_piece and axis:  # steps of one sample
        return len(found.unique()) <= 1
    merged = sorted(record.inputs[0].shape) != sorted(record.given[0])  # an axis behind may be as long as both together
    if merged and count == n * steps:
        return torch.equal(found, number % n if axis else number // steps)
    if record.data_axis is None:  # a copy, whose samples may have been put in another order
        found = found.sort().values
    in_order = len(rows) != n or torch.equal(found, number)
    return in_order and (record.reads_piece or record.shifted == axis)


def is_of_data(record: Record) -> bool:
    """Whether a call reads the data of the model, as far as that can be seen: a part of it, a view or a copy."""
    return record.reads_data or record.data_axis is not None


def free_axes(record: Record) -> torch.Size | None:
    """The sizes of axes, behind the first, that a layer treats one by one (`None`: not known)."""
    looks_at = record.rule.acts_on(record.call()) if record.rule is not None else None
    shape = record.inputs[0].shape
    return None if looks_at is None else shape[1 : len(shape) - looks_at]


def is_given_data(record: Record) -> bool:
    """Whether a call's inputs depend on no parameter."""
    return bool(record.inputs) and all(node is None for node, _ in record.edges)
