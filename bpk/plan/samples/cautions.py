"""What users are told, once for each loss, where nothing but a guess says which rows are samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from weakref import WeakSet

from torch import Tensor, nn

from bpk.jacobians.core.errors import explain, warn
from bpk.plan.samples.given import (
    axis_of_data,
    calls_of_models,
    follows_data,
    free_axes,
    is_given_data,
    is_of_data,
    is_told,
)
from bpk.plan.samples.listed import are_listed, are_nodes, one_by_one
from bpk.plan.samples.placement import Placement
from bpk.plan.sources import Sources
from bpk.recording.record import Record

CAUTIONED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told of a batch of one."""

ROWS: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that it is a guess which sample rows are of."""

TOLD: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that the axis of samples is a guess."""

AXES: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that samples seem to be along another axis."""


def caution(found: Placement) -> None:
    """Tell the user what is a guess about the samples behind a loss."""
    root, calls, n, rows = found.root, found.calls, found.n, found.rows
    caution_batch_of_one(root, calls, n)
    caution_one_sample(root, calls, n, found.sources)
    caution_layout(root, calls, n, rows)
    caution_draws(root, calls, n)
    caution_rows(root, calls, n, rows)
    caution_axis(root, calls, n, rows)


def tell(told: WeakSet[nn.Module], loss: Record, what: str, why: str, do: str) -> None:
    """Tell the user, and note for which loss."""
    told.add(loss.module)
    warn(explain(what, why, f"{do} Or say of which sample each row is: backpack(..., samples=...)."))


def caution_batch_of_one(root: Record, above: list[Record], n: int) -> None:
    """Tell the user once where rows are taken for samples, and the model was given a single one.

    Functions have merged axes in front of all layers then; nothing tells samples from steps of one sample.
    """
    for record in above:
        if record.knows_batch or (record.given and record.given[0][:1] != (1,)):
            return
    given = [shape[0] for record in above for shape in record.given if shape]
    if n < 2 or not given or n in given or root.module in CAUTIONED:
        return
    calls = len(calls_of_models(above))
    if are_listed(above, n) or one_by_one(root, above) or root.batch_size > n == calls:
        return
    given_as, because = "one row", "functions merge axes in front of all layers"
    if are_nodes(root, above):
        given_as, because = "tensors of one row", "each of these rows depends on tensors of its own"
    tell(
        CAUTIONED,
        root,
        f"The model was given {given_as}, and the {n} rows of '{root.path}' are taken for samples.",
        f"{because}, and nothing tells whether these are samples or parts of one.",
        "give the model at least two samples, or merge axes behind its first layer.",
    )


def caution_one_sample(root: Record, above: Sequence[Record], n: int, sources: Sources) -> None:
    """Tell the user once where a model was given as many rows as the loss has, and all are taken for one sample.

    A layer that knows its batch axis has one row then. That is right for steps of a sample, which such a layer sees,
    and not for samples beside a table that it sees; nothing tells which, unless it does read the data.
    """
    if n != 1 or root.batch_size < 2 or root.module in CAUTIONED or not is_told(root, above):
        return
    known = [record for record in above if record.knows_batch and record.batch_size == 1]
    if not known or any(is_of_data(each) for record in known for each in (record, *sources.upstream(record))):
        return
    tell(
        CAUTIONED,
        root,
        f"The model was given {root.batch_size} rows, and all are taken for one sample.",
        f"{known[-1].where} has a batch of one, and nothing tells whether that is a part of them or beside them.",
        "give the model another number of rows than an axis of that layer has, or a batch axis.",
    )


def caution_rows(root: Record, above: Sequence[Record], n: int, rows: Mapping[Record, Tensor]) -> None:
    """Tell the user once where a loss has more rows than the model was given, and nothing tells whose each is.

    Functions have picked or repeated rows of data in front of all layers then, any number of each sample
    (`layer(x[mask])`). Merged axes of the first tensor that it was given are no guess, nor are several tensors one
    behind another, nor calls that keep the axis of samples. Without a loss, there may be fewer rows, too (experts).
    """
    if root.module in ROWS:
        return
    given = [shape for shapes in {id(r.given): r.given for r in above}.values() for shape in shapes if shape]
    counts, count = [shape[0] for shape in given], root.batch_size
    if not counts:
        return
    fewer = not root.is_loss and count < min(counts) and not any(count in shape[:2] for shape in given)
    if (n < 2 or max(counts) >= count) and not fewer:
        return
    if counts[0] == 1:
        return
    if root.is_loss and sum(counts) == count and len({shape[1:] for shape in given}) == 1:
        return
    if are_listed(above, count) or any(r.owners is not None and len(r.owners) == count for r in above):
        return
    seen = [record for record in above if is_given_data(record)]
    if count == merged_rows(given[0]) and not any(r.inputs[0].shape[1:] == given[0][1:] for r in seen):
        return
    in_rows = all(record in rows or record.batch_size == n for record in seen)
    kept = any(record.knows_batch or (n != count and record not in rows and record.batch_size == n) for record in above)
    if kept or not seen or not in_rows or any(is_of_data(record) for record in seen):
        return
    groups = "each is taken for a sample" if n == count else f"each {count // n} in a row are taken for a sample"
    tell(
        ROWS,
        root,
        f"The model was given {counts[0]} rows, and of the {count} rows of '{root.path}' {groups}.",
        "functions pick, repeat or join rows in front of all layers, and nothing tells which sample these are of.",
        "pick them behind the first layer, or ignore those that do not count in the loss (ignore_index, weights).",
    )


def merged_rows(shape: Sequence[int]) -> int:
    """How many rows the first two axes of data have as one."""
    return prod(shape[:2]) if len(shape) > 1 else 0


def caution_layout(root: Record, above: Sequence[Record], n: int, rows: Mapping[Record, Tensor]) -> None:
    """Tell the user once where nothing but a guess tells which rows are samples, and which steps.

    Samples and steps are as many, functions were in front of all layers, and the rows of the loss are not grouped as
    data are: either they were put in another order behind the layers, or in front of them. If no layer sees data, they
    may be grouped as steps all the same. Or only positions have parameters, and their steps are taken for samples.
    """
    order = rows.get(root)
    if order is None or root.module in TOLD:
        return
    given = [record.given[0][:2] for record in above if record.given]
    if not given or any(shape[1:] != (n,) for shape in given):
        return
    seen = [record for record in above if axis_of_data(record) is not None and record.given[0][:2] == (n, n)]
    moved = bool((order.diff() < 0).any())
    if any(record.data_axis is not None for record in seen) or (seen and not moved):
        return
    if not seen and (len(order) % merged_rows(given[0]) or any(tells_layout(record) for record in above)):
        return
    where = f"along the first axis of the input of '{seen[-1].path}'" if seen else "no layer sees them"
    another = "are in another order, so that one of the two was transposed"
    tell(
        TOLD,
        root,
        f"The model was given {given[0][0]} rows of {n}, and which of the two are samples behind functions of them is "
        f"a guess: {where}.",
        f"the rows of '{root.path}' {another if moved else f'are taken for {n} samples'}.",
        "use a batch that is not as large as the second axis is long, or a layer in front of the functions.",
    )


def caution_draws(root: Record, above: Sequence[Record], n: int) -> None:
    """Tell the user once where functions of data have made another axis as long as that of samples, such as draws."""
    if n < 2 or root.batch_size == n or root.module in TOLD:
        return
    if any(record.given and record.given[0][:1] != (n,) for record in above):
        return
    seen = [record for record in above if has_another_axis(record, n)]
    if not seen or any(is_given_data(record) or record.knows_batch for record in above if record not in seen):
        return
    where = f"what {seen[-1].where} sees has these samples is a guess: axis {seen[-1].shifted}"
    tell(
        TOLD,
        root,
        f"The model was given {n} rows, and which axis of {where}.",
        "functions in front of all layers have made another one of as many, or of a multiple (draws of each sample).",
        "use another number of draws than samples, or a layer in front of the functions.",
    )


def has_another_axis(record: Record, n: int) -> bool:
    """Whether a call sees functions of data with several axes that may be those of samples."""
    if not record.given or not is_given_data(record) or record.data_axis is not None:
        return False
    seen = record.inputs[0].shape
    made = len(seen) > len(record.given[0]) or seen[:2] != record.given[0][:2]
    return made and seen[0] % n == 0 and n in (free_axes(record) or ())


def tells_layout(record: Record) -> bool:
    """Whether a call knows where samples are, or sees the first axes of what the model was given."""
    alike = bool(record.given) and record.inputs[0].shape[:2] == record.given[0][:2] and is_given_data(record)
    return record.knows_batch or is_of_data(record) or alike


def caution_axis(root: Record, above: Sequence[Record], n: int, rows: Mapping[Record, Tensor]) -> None:
    """Tell the user once where the rows of a loss do not seem to be what the model was given rows of.

    These are along its second axis, as where heads or draws are stacked in front of the batch (`torch.stack`), or steps
    come first; or, where rows are as many as were given, calls that read the data tell that they are others.
    """
    given = {record.given[0] for record in above if record.given and record.given[0]}
    told = root.module in AXES or root.module in ROWS
    if n < 2 or len(given) != 1 or told:
        return
    ((shape,), seen) = given, root.inputs[0].shape
    if shape[0] == n and not [r for r in above if r.reads_data and is_elsewhere(r, rows.get(r), n)]:
        return
    if any(record.knows_batch for record in above):
        return
    free = seen[1:] if root.is_loss else free_axes(root) or ()  # the others of a layer are features
    second = root.batch_size == n and free[:1] == shape[:1]
    if are_listed(above, n) and not (second and len(shape) == 2 < len(seen)):  # bags of instances; images
        return
    may_be_classes = len(seen) == 2 and (n in shape or any(record.shifted for record in above))
    if shape[0] != n and (not second or may_be_classes):
        return
    tell(
        AXES,
        root,
        f"The {n} rows of '{root.path}' are taken for samples, and do not seem to be the {shape[0]} that the model "
        "was given.",
        "samples are along the first axis of what a loss is given, and the model's seem to be along another one.",
        "give the loss samples first: x.transpose(0, 1), torch.stack(..., 1). If its rows are samples, nothing is "
        "needed.",
    )


def is_elsewhere(record: Record, rows: Tensor | None, n: int) -> bool:
    """Whether a call that reads all data has others than these samples (`None`: in order) along their first axis."""
    if record.reads_piece or record.batch_size != n:
        return False
    if rows is None:  # nothing to compute, nor to wait for
        return axis_of_data(record) not in (None, record.shifted)
    return not follows_data(record, rows, n)
