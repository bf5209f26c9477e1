"""Rows of a loss that were picked from what layers return, as `logits[mask]`: any number of each sample's positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bpk.plan.repeated import compact
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.decoding import DIGITS, decode, numbered, owners_of, with_digits
from bpk.plan.samples.hypotheses import reads_tables
from bpk.plan.samples.probing import send_back, tolerance_of
from bpk.plan.samples.proofs import NotKnown, all_apart, labels, one_by_one, spread, where_known
from bpk.recording.record import Record

Places = tuple[list[int], torch.Size, Callable[[int], Tensor | None]]
"""Axes of what a call has returned that may be that of samples, its shape, and along which index each row of the root
is, by axis (`None`: of none, or of several)."""

AxesOf = Callable[[Record, Tensor, Callable[[Tensor], Tensor | None]], list[int]]
"""Those axes, of a call and what has come to it; the last argument tells of which row each of its rows is."""

NOWHERE: Places = [], torch.Size(), lambda axis: None

MOST_ENTRIES = 1 << 22
"""Up to how many numbers rows are looked at one by one."""


def picked_rows(behind: Behind, sure: bool) -> list[tuple[int, Tensor]]:
    """Hypotheses: as many samples as rows were given to the model, and the sample `[R]` of every row of the root.

    The rows of the root are numbered, and their numbers are looked for in the entries of what the last call with an
    axis for samples has returned (in front, or behind others). An entry may be in several rows of the root only if the
    graph and the data tell which these are. It is `sure` only where some sample has several rows, and no axis could be
    that of the root's rows: never where there are as many rows as samples.
    """
    given = {shapes[0][:1] for shapes in {record.given for record in behind.above} if shapes}
    n, count = next(iter(given), (0,))[0] if len(given) == 1 else 0, behind.root.batch_size
    if n < 2 or count == 1 or (sure and n == count):
        return []

    def axes_of(record: Record, mat: Tensor, rows_of: Callable[[Tensor], Tensor | None]) -> list[int]:
        """Axes that may be that of samples (if these are as many as the root's rows: and are not those)."""
        known = range(min(max(1, mat.dim() - 2), mat.dim() - 1))  # a number has none
        found = [axis for axis in known if mat.shape[1 + axis] == n and not record.shifted]
        if found and reads_tables(record, behind.sources):
            return []
        return [a for a in found if n != count or rows_of(mat.movedim(1 + a, 1)) is None]

    axes, shape, owners_along = places_by_form(behind, count, axes_of) or places_by_gradients(behind, count, axes_of)
    if shape.numel() == count or (sure and count in shape):
        return []
    found = []
    for axis in axes:
        owners = owners_along(axis)
        if owners is not None and not (sure and len(owners.unique()) == count):
            found.append((n, owners))
    return found


def owners_in(places: Tensor, count: int, axis: int) -> Tensor | None:
    """The index along an axis of each of so many rows, of the row of every entry (-1: none)."""
    (each,) = compact((places,), but=(axis,))
    numbers = each.movedim(axis, 0)[..., None].flatten(1)
    return owners_of(numbers, torch.arange(len(numbers), device=numbers.device)[:, None].expand_as(numbers), count)


def owners_of_each(reached: Tensor, axis: int) -> Tensor | None:
    """The same of entries `[count, ...]` that each row reaches."""
    (each,) = compact((reached,), but=(1 + axis,))
    there = each.movedim(1 + axis, 1)[..., None].flatten(2).any(2)
    return there.long().argmax(1) if bool((there.sum(1) == 1).all()) else None


def places_by_form(behind: Behind, count: int, axes_of: AxesOf) -> Places | None:
    """Where so many rows come from as the graph and the data say that it has in it (`None`: they do not tell)."""
    weights = all_apart(count).to(where_known(behind))
    known = {behind.root: torch.arange(count, device=weights.device)}
    rows_of = partial(labels, weights=weights)
    try:
        for record, columns, rows in spread(behind, known, weights, now=True):
            if columns is None:
                continue
            if axes := axes_of(record, columns, rows_of):
                (some,) = compact((columns,))
                numbers = rows_of(some.flatten(1)[..., None])
                shape = columns.shape[1:]
                if numbers is not None:
                    return axes, shape, partial(owners_in, numbers.view(some.shape[1:]).expand(shape), count)
                each = None if count * some[0].numel() > MOST_ENTRIES else one_by_one(behind, known, record, count)
                return None if each is None else (axes, shape, partial(owners_of_each, each))
            if rows is None:
                return None
            known[record] = rows
    except NotKnown:
        return None
    return NOWHERE


def places_by_gradients(behind: Behind, count: int, axes_of: AxesOf) -> Places:
    """The same by gradients of the rows, with a few binary digits of their numbers at a time."""
    tolerance = tolerance_of(behind.records)
    rows_of = partial(decode, n=1 << DIGITS, tolerance=tolerance)
    total: Tensor | None = None
    axes, shape = list[int](), torch.Size()
    for place, weights in numbered(count, behind.root.inputs[0].device):
        for record, mat in send_back(behind, weights):
            if axes := axes_of(record, mat, rows_of):
                break
        else:
            return NOWHERE
        part = rows_of(mat.flatten(1)[..., None], in_order=False)
        if part is None:
            return NOWHERE
        shape, total = mat.shape[1:], with_digits(total, part, place)
    return NOWHERE if total is None else (axes, shape, partial(owners_in, total.view(shape), count))
