"""Proofs of where samples are: what follows from the form of a graph alone, whatever the values are."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from bpk.plan.dependence import reached_entries
from bpk.plan.graph import Source
from bpk.plan.repeated import added, compact
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.findings import may_be_in
from bpk.plan.survey import mixes
from bpk.recording.record import Record

ROUNDING = 1e-9
"""Of ratios in double precision that are equal."""

VERY_MANY = 1 << 20
"""From how many numbers on single precision cannot tell them apart."""


def prove(behind: Behind, n: int, found: dict[Record, Tensor], now: bool = False) -> list[Tensor | None] | None:
    """The sample of each row of every call, the root's last, as it follows from the form alone.

    Or, if that is enough, as it follows `now`: from the form, and from the places to which data move entries.

    Returns:
        `None` where it does not follow, or something else follows than what was `found`.
    """
    start = found.get(behind.root, torch.arange(n, device="cpu"))
    known = behind.has_followed(n, start.cpu()) or follow(behind, n, start, now=now)
    if known is None:
        return None
    in_order = torch.arange(n, device=known[behind.root].device)
    result: list[Tensor | None] = []
    for record in behind.records:
        before = found.get(record, in_order).to(in_order.device)
        after = known.get(record, before)
        if len(before) != len(after) or bool(((before != after) & (before >= 0) & (after >= 0)).any()):
            return None
        rows = after if now else torch.where(after < 0, before, after)  # what data had picked before is not picked now
        result.append(None if torch.equal(rows, in_order) else rows.to(record.output.device))
    return result


def follow(
    behind: Behind,
    n: int,
    rows: Tensor,
    movable: bool = False,
    tables: Container[Record] = (),
    now: bool = False,
) -> dict[Record, Tensor] | None:
    """The sample of each row (-1: none) of the calls behind rows of the root, if it is of one whatever the values.

    Where the samples of a call are along another axis, that is moved to the front if it is `movable`. Rows of `tables`
    may feed several samples; those that do are left out. What follows may hold `now`, and not in another pass.
    """
    rows = rows.to(where_known(behind))
    weights, known = all_apart(n).to(rows.device), {behind.root: rows}
    try:
        for record, columns, found in spread(behind, known, weights, now):
            if found is None and columns is not None and movable:
                found = moved(record, columns, weights)
            if found is not None:
                known[record] = found
            elif columns is None or record not in tables:
                return None
    except NotKnown:
        return None
    if not now and len(known) == len(behind.records):
        behind.followed = n, rows.cpu(), known
    return known


def where_known(behind: Behind) -> torch.device:
    """Where numbers are followed: others may have no double precision."""
    device = behind.root.inputs[0].device
    return device if device.type == "cuda" else torch.device("cpu")


class NotKnown(Exception):
    """It does not follow from the form of the graph what a function hands on."""


def spread(
    behind: Behind, known: Mapping[Record, Tensor], weights: Tensor, now: bool
) -> Iterator[tuple[Record, Tensor | None, Tensor | None]]:
    """What comes to each call behind the root (`None`: nothing), the latest first, of columns `[2, R, ...]`; `labels`.

    They are one at each row, and the weight of its number. Whoever looks at them says of which numbers the rows of the
    call are, in `known`, where those of the root are: then it passes them on, and nothing else.

    Raises:
        NotKnown: If that does not follow from the form (or, `now`, from what data say, too), or if rows are mixed.
    """
    arrived: dict[Record, Tensor] = {}
    as_sent: dict[Record, Tensor] = {}  # the rows of calls whose result another call is given as it is, and no other
    for record in [behind.root, *behind.sources.in_backward_order(behind.root, behind.above)]:
        if record is not behind.root:
            columns, rows = arrived.pop(record, None), as_sent.pop(record, None)
            yield record, columns, rows if rows is not None or columns is None else labels(columns, weights)
        rows = known.get(record)
        if rows is None:
            continue
        if record.problem or mixes(record):  # not row by row, whatever its values say here
            raise NotKnown
        alive = (rows >= 0).double()
        columns = torch.stack([alive, alive * weights[rows.clamp(min=0)]])
        for source in behind.sources[record].values():
            direct = source.stretch is None and source.entrance.plain and source.exits[0].plain
            for target, part in to_targets(source, columns, now):
                if part is None:
                    raise NotKnown
                as_sent.pop(target, None)
                if target in arrived:
                    part = added(arrived[target], part)
                elif direct:
                    as_sent[target] = rows
                arrived[target] = part


def all_apart(n: int) -> Tensor:
    """Weights `[n]` between one and two, in order: none is the mean of others, and no two of many are nearly equal.

    Single precision has them, too, unless they are very many.
    """
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    weights = 1 + (torch.arange(n, device="cpu") + drawn / 2) / n
    return weights.float().double() if n < VERY_MANY else weights


def one_by_one(behind: Behind, known: Mapping[Record, Tensor], record: Record, count: int) -> Tensor | None:
    """Where each of so many rows reaches a call now, `[count, ...]`; rows of calls between are `known` to be of these.

    Returns:
        `None` where it does not follow.
    """
    numbers, total = torch.arange(count, device=where_known(behind)), None
    for consumer, rows in known.items():
        for source in behind.sources[consumer].values():
            sent = record in [target for target, _ in source.targets]
            for target, part in to_targets(source, (rows == numbers[:, None]).double(), now=True) if sent else ():
                if target is record and part is None:
                    return None
                if target is record and part is not None:
                    total = part if total is None else added(total, part)
    return total


def to_targets(source: Source, columns: Tensor, now: bool = False) -> Iterator[tuple[Record, Tensor | None]]:
    """What comes to the calls that feed an input, of columns `[V, R]` of its rows (`None`: not known)."""
    if not source.targets:
        return
    shape = source.consumer.inputs[source.index].movedim(source.consumer.axis(source.index), 0).shape
    if shape[:1] != columns.shape[1:]:  # a call without a batch axis, whose axis 0 holds its entries
        yield from ((record, None) for record, _ in source.targets)
        return
    columns = columns.reshape(*columns.shape, *[1] * (len(shape) - 1)).expand(len(columns), *shape)
    at_graph = source.entrance.to_graph(columns)
    if source.stretch is None:
        yield source.targets[0][0], source.exits[0].to_rule(at_graph)
        return
    found = reached_entries(source, at_graph, now)
    for number, (record, _) in enumerate(source.targets):
        if found is None:
            yield record, None
        elif number in found:
            yield record, source.exits[number].to_rule(found[number])


def moved(record: Record, columns: Tensor, weights: Tensor) -> Tensor | None:
    """The samples along another axis of a call, preferably all of them in order; it is in front then."""
    if record.binding.axes or record.rule is None or len(record.used) > 1:
        return None
    axes = [axis for axis in range(1, columns.dim() - 1) if may_be_in(record, axis)]
    found = {axis: rows for axis in axes if (rows := labels(columns.movedim(1 + axis, 1), weights)) is not None}
    numbers = torch.arange(len(weights), device=weights.device)
    in_order = [axis for axis, rows in found.items() if torch.equal(rows, numbers)]
    for axis in (*in_order, *found):
        record.shift(axis)
        return found[axis]
    return None


def labels(columns: Tensor, weights: Tensor) -> Tensor | None:
    """The sample `[R]` of each row of columns `[2, R, ...]` (-1: none), or `None` if one has entries of several."""
    (columns,) = compact((columns,), but=(0, 1))
    plain, weighted = columns[..., None].flatten(2)
    total = plain.sum(1)
    ratio = torch.where(total > 0, weighted.sum(1) / total, 0.0)
    number = torch.searchsorted(weights, ratio - ROUNDING).clamp(max=len(weights) - 1)
    off = (weighted - plain * weights[number][:, None]).abs()
    if bool((off > ROUNDING * plain).any()):
        return None
    return torch.where(total > 0, number, -1)
