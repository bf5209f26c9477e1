"""Losses that see different rows of what the model was given: whose they are, or what users are told, once for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from weakref import WeakSet

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import explain, warn
from bpk.plan.samples.placement import Placement
from bpk.recording.record import Record

PARTED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that others see other rows."""


def count_rows_given(placements: Sequence[Placement]) -> None:
    """Take the rows that the model was given for samples, where losses see some of them each.

    So it is where labels are missing (`loss_fn(out[known], y[known])` of several tasks), or a part of a batch has none.
    Equal parts may be views of one sample, and are left as they are: the user is told (`caution_parts`).
    """
    if len(placements) < 2 or all(each.n == placements[0].n and not each.rows for each in placements):
        return
    count, *others = {rows_given(each) for each in placements}
    if count is None or others:
        return
    picked = [rows_seen(each, count) for each in placements]
    known = [rows for rows in picked if rows is not None]
    if len(known) < len(picked) or all(may_be_same(one, other) for one, other in combinations(known, 2)):
        return
    for each, rows in zip(placements, known, strict=True):
        renumber(each, rows, count)


def rows_given(placement: Placement) -> int | None:
    """How many rows the model was given, as the first call behind a loss knows it."""
    shape = next((r.given[0] for r in reversed(placement.above) if r.given), ())
    return shape[0] if shape else None


def rows_seen(placement: Placement, count: int) -> Tensor | None:
    """`[N]`: which of so many rows each sample of a loss is; `None` if that is not known, or if it is several."""
    device = placement.root.inputs[0].device
    in_order, told = torch.arange(count, device=device), list[Tensor]()
    for record in placement.above:
        if record.batch_size == count and not record.shifted:
            samples = placement.rows.get(record, in_order).to(device)
            if not any(samples is other or torch.equal(samples, other) for other in told):
                told.append(samples)
    found = torch.full((placement.n,), -1, device=device)
    for samples in told:
        (rows,) = torch.nonzero(samples >= 0, as_tuple=True)
        numbers = samples[rows]
        if bool((numbers >= placement.n).any()) or len(numbers.unique()) < len(numbers):
            return None
        before = found[numbers]
        if bool(((before >= 0) & (before != rows)).any()):
            return None
        found[numbers] = rows
    if placement.n == count:  # some may have nothing in a loss (no token of theirs was picked)
        found = torch.where(found < 0, in_order, found)
    return None if bool((found < 0).any()) or len(found.unique()) < len(found) else found


def may_be_same(one: Tensor, other: Tensor) -> bool:
    """Whether two losses see the same rows, or as many others: parts that follow each other or take turns, or pairs.

    What a mask has picked is in order, and at no fixed distance.
    """
    if len(one) != len(other):
        return False
    other = other.to(one.device)
    between = other - one
    if not between.any():
        return True
    by_mask = bool((one.diff() > 0).all() and (other.diff() > 0).all()) and len(between.unique()) > 1
    return not by_mask and not bool(torch.isin(one, other).any())


def renumber(placement: Placement, rows: Tensor, count: int) -> None:
    """Number samples by the rows that the model was given; those of which a loss says nothing are theirs in order."""
    found = dict[Record, Tensor]()
    for record in (*placement.above, placement.root):
        samples = placement.rows.get(record)
        if samples is None and record.batch_size != placement.n:
            continue
        at = rows.to(record.output.device if samples is None else samples.device)
        numbers = at if samples is None else torch.where(samples >= 0, at[samples.clamp(min=0)], -1)
        in_order = torch.arange(len(numbers), device=numbers.device)
        if len(numbers) != count or bool(((numbers >= 0) & (numbers != in_order)).any()):
            found[record] = numbers
    placement.rows, placement.n = found, count


def caution_parts(losses: Mapping[Record, tuple[Sequence[Record], Mapping[Record, Tensor]]]) -> None:
    """Tell the user once where losses take different rows that the model was given for the same samples.

    That is right for several views of a sample in one batch, and not for parts of a batch; nothing tells which. Of each
    loss there are the calls behind it, from the last one to the first, and the samples of rows where these differ.
    """
    first: dict[Record, Tensor] = {}
    start: Tensor | None = None
    for loss, (above, rows) in losses.items():
        data = next((record.inputs[0] for record in reversed(above) if record.reads_data), None)
        start = data if start is None else start
        if data is not None and start is not None and are_parts(start, data) and loss.module not in PARTED:
            tell_of_parts(loss, f"'{loss.path}' sees other rows than a loss before, of the same tensor.")
            continue
        below = [r for r in above if r in rows and r.given and r.given[0][:1] == rows[r].shape]
        if not below or loss.module in PARTED:
            continue
        samples, known = rows[below[-1]], first.setdefault(below[-1], rows[below[-1]])
        if known is samples or bool(((samples >= 0) & (known >= 0)).any()):
            continue
        of = f"of the {len(samples)} that the model was given"
        tell_of_parts(loss, f"'{loss.path}' sees other rows than a loss before, {of}.")


def tell_of_parts(loss: Record, what: str) -> None:
    """Tell the user of losses that see different rows."""
    PARTED.add(loss.module)
    warn(
        explain(
            what,
            "sample k of one loss counts as sample k of the other, as for two views of one sample, so that what "
            "belongs to a sample is a sum over several rows.",
            "if they are different samples, give all rows to one loss (to weight them: a loss module of your own), or "
            "use one backward pass for each loss.",
        )
    )


def are_parts(one: Tensor, other: Tensor) -> bool:
    """Whether two views of a tensor are different rows of it: `x[:2]` and `x[2:]`, and not `x[:, 0]` and `x[:, 1]`."""
    if one.untyped_storage() is not other.untyped_storage() or one.stride() != other.stride() or not one.dim():
        return False
    step, between = one.stride(0), other.storage_offset() - one.storage_offset()
    if not step or between % step:
        return False
    rows = between // step
    return rows >= len(one) or -rows >= len(other)
