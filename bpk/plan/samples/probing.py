"""Gradients of rows, sent back from a loss through all calls behind it, or from one call to those that feed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.products import add_up
from bpk.jacobians.families.no_rows import with_rows
from bpk.plan.graph import Source, connected
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.decoding import batch_axis, decode, digits
from bpk.plan.sources import Sources
from bpk.plan.survey import mixes
from bpk.recording.record import Record

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of gradients that are equal or zero, by the precision of the layers."""
COARSE = 0.05
"""The same where a layer computes in a shorter format."""


def tolerance_of(records: Iterable[Record]) -> float:
    """How exactly numbers are known behind these calls."""
    return max(TOLERANCE.get(record.output.dtype, COARSE) for record in records)


def send_back(behind: Behind, weights: Tensor) -> Iterator[tuple[Record, Tensor]]:
    """Send gradients `[V, R]`, spread over the entries of each row of the root, back; yield what reaches each call."""
    arrived: dict[Record, Tensor] = {}
    for index, source in behind.sources[behind.root].items():
        if source.targets:
            send(source, at_input(behind.root, index, weights), arrived)
    nodes = {r: node for found in behind.sources.values() for s in found.values() for r, (node, _) in s.targets}
    with torch.no_grad():
        for record in behind.sources.in_backward_order(behind.root, behind.above):
            mat = arrived.pop(record, None)
            if mat is not None:
                before = record.shifted
                yield record, mat
                if record.shifted != before:
                    mat = mat.movedim(1 + record.shifted, 1)
                pass_on(record, nodes[record], mat, behind.sources[record], arrived)


def at_input(record: Record, index: int, weights: Tensor) -> Tensor:
    """Gradients `[V, R]` of rows, spread over the entries of an input, in single precision at least."""
    start = record.inputs[index].movedim(record.axis(index), 0)
    probe = torch.arange(start.numel(), device=start.device).add(1.0 + index).cos().add(1.5).reshape(start.shape)
    spread = probe * weights.reshape(*weights.shape, *[1] * (start.dim() - 1))
    return spread.to(torch.promote_types(start.dtype, torch.float32))


def pass_on(
    record: Record, node: Node | None, mat: Tensor, sources: dict[int, Source], arrived: dict[Record, Tensor]
) -> None:
    """Send the gradients through a call's rule to what feeds it."""
    if record.rule is None or record.problem or node is None:
        return
    call = record.call()
    if record.rule.obstacle(call) is not None:
        return
    with connected(record, call, node):
        record.rule.capture(call)
        cast = call.cast(mat.dtype)
        for index, source in sources.items():
            if source.targets:
                send(source, with_rows(record.rule, cast).jac_t_mat_prod(cast, mat, index), arrived)


def send(source: Source, mat: Tensor, arrived: dict[Record, Tensor]) -> None:
    """Add up what reaches each producer."""
    for number, part in source.pull(mat).items():
        record = source.targets[number][0]
        arrived[record] = arrived[record] + part if record in arrived else part


def uses_of(records: Iterable[Record], sources: Sources) -> dict[Record, list[tuple[Record, Source]]]:
    """By record: the calls that it feeds, and how it comes there."""
    uses: dict[Record, list[tuple[Record, Source]]] = {}
    for consumer in records:
        for source in sources[consumer].values():
            for record, _ in source.targets:
                uses.setdefault(record, []).append((consumer, source))
    return uses


def with_fewer_zeros(
    record: Record,
    mat: Tensor,
    uses: Sequence[tuple[Record, Source]],
    found: dict[Record, Tensor],
    n: int,
    tolerance: float,
) -> Tensor:
    """Gradients of which fewer entries are zero, if they tell samples apart: of any numbers at inputs of calls behind.

    Entries without a gradient (at a point of rest, such as the square of zero) may have a second derivative. As rules
    keep rows apart, an entry belongs to the sample of the row of which it becomes a part.
    """
    total = torch.zeros_like(mat)
    for consumer, source in uses:
        rows = found.get(consumer)
        if rows is None or consumer.problem or mixes(consumer):
            return mat
        here = at_input(consumer, source.index, digits(rows.clamp(min=0), n) * (rows >= 0))
        total = add_up([total, *[part for k, part in source.pull(here).items() if source.targets[k][0] is record]])
    told = decode(total, n, tolerance) is not None or batch_axis(total, n, tolerance)[0]
    return total if told else mat
