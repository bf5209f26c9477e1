"""Uses that are kept for later: until the last loss is reached (for Kronecker factors), or beyond autograd's graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bpk.fields.arrived import Averages, ClosedForm, Columns, Use
from bpk.fields.statistics import Uses
from bpk.fields.sums import squared_norms, weighted_sum
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import FEW_NUMBERS
from bpk.jacobians.core.side_by_side import as_rows
from bpk.plan.parts import in_parts
from bpk.plan.stretch_call import StretchCall
from bpk.recording.changed import Changed, Stamp, changed, stamp


class KeptRows(Uses):
    """Rows `[V, N, *p]` by key: all that is kept of the uses of a parameter; what its calls had read is let go."""

    def __init__(self, uses: Uses, blocks: dict[Hashable, Tensor]) -> None:
        first = uses.uses[0]
        call = Call(None, (), {first.name: uses.param}, uses.param)
        arrived = Columns({}, {first.name: blocks}, uses.signs)
        use = Use(call, first.rule, first.name, arrived, origin=first.origin)
        super().__init__(uses.parameter, uses.batch_size, [use], loss_scale=uses.loss_scale)
        self.blocks_of_rows = blocks

    @property
    def only(self) -> Tensor:
        """The rows `[N, *p]` of the only block."""
        return next(iter(self.blocks_of_rows.values()))[0]

    def norm_squared(self) -> Tensor:
        return squared_norms(self.only)

    def summed(self, weights: Tensor | None = None) -> Tensor:
        if weights is None or len(self.blocks_of_rows) > 1:
            return super().summed(weights)
        return weighted_sum(weights, self.only)


class Together(KeptRows):
    """Rows of several parameters side by side, as those of one: for what is the same sum over all their entries.

    They are made alike to those of the first parameter, `uses`, and `join`ed when all are there.
    """

    def __init__(self, uses: Uses, key: Hashable) -> None:
        super().__init__(uses, {})
        self.key = key
        self.params: list[Tensor] = []
        self.parts: list[Tensor] = []

    def add(self, param: Tensor, rows: Tensor) -> None:
        """Take rows `[N, *p]` of one more parameter."""
        self.params.append(param)
        self.parts.append(rows if rows.dim() == 2 else as_rows(rows))

    def join(self) -> None:
        """All are there."""
        rows = torch.cat(self.parts, 1)
        self.blocks_of_rows[self.key] = rows[None]
        self.param, self.parts = rows.new_empty(rows.shape[1:]), []

    def parted(self, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What belongs to each parameter, in memory of its own."""
        shapes = [in_parts(p).shape for p in self.params]
        for param, shape, part in zip(self.params, shapes, value.split([s.numel() for s in shapes]), strict=True):
            yield param, (part if len(shape) == 1 else part.view(shape)).clone()


def are_small(rows: Mapping[Hashable, Tensor]) -> bool:
    """Whether there is one block, and what is asked of it costs more to begin than to do. Graphs stay apart."""
    return len(rows) == 1 and next(iter(rows.values())).numel() <= FEW_NUMBERS and not torch.is_grad_enabled()


def smaller_rows(uses: Uses) -> dict[Hashable, Tensor] | None:
    """Rows `[V, N, *p]` by key, where they are not larger than what they are made of."""
    size = 0
    for use in uses.uses:
        for x in (*use.arrived.blocks.values(), *use.call.inputs):
            size += x.numel() if x.is_floating_point() else 0
    if uses.param.numel() * uses.count > size:
        return None
    if uses.simple and len(uses.keys) == 1:
        return {uses.keys[0]: uses.individual()[None]}
    return {key: uses.rows(key) for key in uses.keys}


def lean(uses: Uses) -> Uses | dict[Hashable, Tensor]:
    """Uses that are kept until the pass is over; or rows, by key, where they are smaller than what they are made of."""
    rows = smaller_rows(uses)
    if rows is not None:
        return rows
    kept = [u if u.rule.reads_output else replace(u, call=u.call.without_output()) for u in uses.uses]
    return Uses(uses.parameter, uses.batch_size, kept, loss_scale=uses.loss_scale)


def stamps_of(uses: Uses) -> list[list[Stamp]]:
    """For each use, what tells later whether parameters that its rule may read still have their values."""
    return [[] if use.rule.sums_by_product else list(map(stamp, use.call.params.values())) for use in uses.uses]


def as_noted(uses: Uses, stamps: list[list[Stamp]]) -> Uses:
    """The uses with stand-ins for parameters that were changed meanwhile: a rule that reads one of these says so."""
    pairs = zip(uses.uses, stamps, strict=True)
    gone = [changed(use.call.params, known) if known else [] for use, known in pairs]
    if not any(gone):
        return uses
    found: list[Use] = []
    for use, names in zip(uses.uses, gone, strict=True):
        where, call = f"the layer with '{use.name}' {list(uses.param.shape)}", use.call
        seen = call.seen_with(call.options)  # what was computed of its parameters is forgotten
        seen.pull = call.pull
        seen.params.update({name: Changed.of(where, name, call.params[name]) for name in names})
        found.append(replace(use, call=seen) if names else use)
    return Uses(uses.parameter, uses.batch_size, found, loss_scale=uses.loss_scale)


def merged(before: list[Use], uses: list[Use]) -> list[Use]:
    """Uses in the columns of several losses: those of one call are one use."""
    found = {(use.origin, use.name): use for use in before}
    for use in uses:
        known = found.get((use.origin, use.name))
        found[use.origin, use.name] = use if known is None else replace(use, arrived=known.arrived.merged(use.arrived))
    return list(found.values())


def without_graph(use: Use, n: int) -> Use:
    """A use that does not need autograd's graph any more: the rows of a stretch are computed now."""
    if not isinstance(use.call, StretchCall) or isinstance(use.arrived, ClosedForm):
        return use
    if isinstance(use.arrived, Averages):
        assert use.arrived.matrix is not None  # nothing was computed yet
        block = use.rule.congruence(use.call, use.arrived.matrix, use.name)
        shared = use.arrived.shared.get(use.name)
        return replace(use, arrived=Averages(None, {use.name: block if shared is None else shared + block}))
    rows = Columns(signs=use.arrived.signs)
    one = Uses(use.call.params[use.name], n, [use])
    for key in one.keys:
        rows.add_to_parameter(use.name, key, one.rows(key), use.arrived.signs[key])
    return replace(use, arrived=rows)
