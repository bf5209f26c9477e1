"""Samples of packed sequences: which sequence each row of a loss is of, whatever order its rows are in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bpk.plan.samples.behind import Behind
from bpk.plan.samples.decoding import DIGITS, decode, numbered, owners_of, with_digits
from bpk.plan.samples.given import is_of_data
from bpk.plan.samples.probing import send_back, tolerance_of
from bpk.recording.record import Record


def rows_as_packed(behind: Behind, in_turns: bool) -> Iterator[tuple[int, Tensor]]:
    """Hypotheses: how many sequences there are, and the sequence of every row of the root, if it has more rows.

    These are the rows of a packed sequence, one step of all sequences after the other (`in_turns`), or some of them in
    another order (padded, and picked by a mask).
    """
    for record in behind.calls:
        for n, owners in owners_in(record):
            if n == behind.root.batch_size:
                continue
            if in_turns and len(owners) == behind.root.batch_size:
                yield n, owners
            elif not in_turns and record is not behind.root:
                found = owners_at_root(behind, record, owners)
                if found is not None:
                    yield n, found


def owners_in(record: Record) -> list[tuple[int, Tensor]]:
    """How many samples there may be, and whose the rows of a call are that has returned packed sequences.

    Each sequence is one, unless the first two axes of what the model was given have become one: parts of samples.
    """
    if record.owners is None:
        return []
    sequences, given = number_of(record.owners), [*record.given[0][:2]] if record.given else []
    merged = len(given) == 2 and given[0] * given[1] == sequences and given[0] != sequences
    return [(given[0], record.owners // given[1])] * merged + [(sequences, record.owners)]


def number_of(owners: Tensor) -> int:
    """How many sequences were packed."""
    return int(owners.max()) + 1


def owners_at_root(behind: Behind, record: Record, owners: Tensor) -> Tensor | None:
    """The sequence of every row of the root, from the row of the root that each row of a packed sequence feeds.

    `None`: it feeds several of them, or a row of the root is fed by none, or by those of several sequences.
    """
    tolerance = tolerance_of(behind.records)
    numbers: Tensor | None = None
    for place, weights in numbered(behind.root.batch_size, behind.root.inputs[0].device):
        mat = next((mat for call, mat in send_back(behind, weights) if call is record), None)
        part = None if mat is None else decode(mat, 1 << DIGITS, tolerance, in_order=False)
        if part is None or part.shape != owners.shape:
            return None
        numbers = with_digits(numbers, part, place)
    return None if numbers is None else owners_of(numbers, owners, behind.root.batch_size)


def in_order_of_data(calls: Sequence[Record], rows: Mapping[Record, Tensor], n: int) -> Tensor | None:
    """Which sample each of `n` numbers stands for, where the samples of rows are these numbers (`None`: unknown).

    Sequences may have been put in another order before they were packed, or behind it. Calls that read the data of the
    model tell, or else those that have returned packed sequences.
    """
    for record in calls:
        found = rows.get(record)
        if is_of_data(record) and not record.reads_piece and record.batch_size == n:
            order = torch.arange(n, device="cpu")
            found = order if found is None else found.cpu()
            if torch.equal(found.sort().values, order):
                return found.argsort()
    for record, owners in [(one, owners.cpu()) for one in calls for k, owners in owners_in(one) if k == n]:
        found = rows[record].cpu() if record in rows else torch.arange(n, device="cpu")
        there = found >= 0
        order = torch.full((n,), -1, device="cpu").index_put((found[there],), owners[there])
        if len(found) == len(owners) and torch.equal(order[found[there]], owners[there]):
            return order if torch.equal(order.sort().values, torch.arange(n, device="cpu")) else None
    return None


def possible_numbers(calls: Iterable[Record]) -> set[int]:
    """How many samples there may be where sequences were packed: these, or what the model was given (nothing: any).

    Rows of other calls are no samples there, such as those of the steps of a recurrent layer.
    """
    owners = [record.owners for record in calls if record.owners is not None]
    if not owners:
        return set()
    given = {shape[0] for record in calls for shape in record.given[:1] if shape}
    return (given - set(map(len, owners))) | set(map(number_of, owners))
