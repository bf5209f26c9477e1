"""What users are told, once for each loss, where nothing but a guess says which rows are samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from weakref import WeakSet

from torch import Tensor, nn

from bpk.jacobians.core.errors import explain, warn
from bpk.plan.samples.given import axis_of_data, is_given_data, is_of_data, is_told
from bpk.plan.samples.hypotheses import are_listed
from bpk.plan.sources import Sources
from bpk.recording.record import Record

CAUTIONED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told of a batch of one."""

ROWS: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that it is a guess which sample rows are of."""

TOLD: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that the axis of samples is a guess."""

PARTED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that others see other rows."""


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
    if are_listed(above, n):
        return
    CAUTIONED.add(root.module)
    warn(
        explain(
            f"The model was given one row, and the {n} rows of '{root.path}' are taken for samples.",
            "functions merge axes in front of all layers, and nothing tells whether these are samples or parts of one.",
            "give the model at least two samples, or merge axes behind its first layer.",
        )
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
    CAUTIONED.add(root.module)
    warn(
        explain(
            f"The model was given {root.batch_size} rows, and all are taken for one sample.",
            f"{known[-1].where} has a batch of one, and nothing tells whether that is a part of them or beside them.",
            "give the model another number of rows than an axis of that layer has, or a batch axis.",
        )
    )


def caution_rows(root: Record, above: Sequence[Record], n: int, rows: Mapping[Record, Tensor]) -> None:
    """Tell the user once where a loss has more rows than the model was given, and nothing tells whose each is.

    Functions have picked or repeated rows of data in front of all layers then, any number of each sample
    (`layer(x[mask])`). Merged axes of the first tensor that it was given are no guess, nor are several tensors one
    behind another, nor calls that keep the axis of samples.
    """
    if n < 2 or root.module in ROWS:
        return
    given = [shape for shapes in {id(r.given): r.given for r in above}.values() for shape in shapes if shape]
    counts, count = [shape[0] for shape in given], root.batch_size
    if 1 in counts[:1] or not counts or max(counts) >= count or count == merged_rows(given[0]):
        return
    if sum(counts) == count and len({shape[1:] for shape in given}) == 1:
        return
    if are_listed(above, count):
        return
    seen = [record for record in above if is_given_data(record)]
    in_rows = all(record in rows or record.batch_size == n for record in seen)
    kept = any(record.knows_batch or (n != count and record not in rows and record.batch_size == n) for record in above)
    if kept or not seen or not in_rows or any(is_of_data(record) for record in seen):
        return
    ROWS.add(root.module)
    groups = "each is taken for a sample" if n == count else f"each {count // n} in a row are taken for a sample"
    warn(
        explain(
            f"The model was given {counts[0]} rows, and of the {count} rows of '{root.path}' {groups}.",
            "functions pick or repeat rows in front of all layers, and nothing tells which sample these are of.",
            "pick them behind the first layer, or ignore those that do not count in the loss (ignore_index, weights).",
        )
    )


def merged_rows(shape: Sequence[int]) -> int:
    """How many rows the first two axes of data have as one."""
    return prod(shape[:2]) if len(shape) > 1 else 0


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
