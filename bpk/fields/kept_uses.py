"""Uses that are kept for later: until the last loss is reached (for Kronecker factors), or beyond autograd's graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bpk.fields.arrived import Averages, ClosedForm, Columns, Use
from bpk.fields.statistics import Uses
from bpk.fields.sums import weighted_sum
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import FEW_NUMBERS
from bpk.jacobians.core.side_by_side import as_rows, beside
from bpk.plan.stretch import StretchCall


class KeptRows(Uses):
    """Rows `[V, N, *p]` by key: all that is kept of the uses of a parameter; what its calls had read is let go."""

    def __init__(self, uses: Uses, blocks: dict[Hashable, Tensor]) -> None:
        first = uses.uses[0]
        call = Call(None, (), {first.name: uses.param}, uses.param)
        arrived = Columns({}, {first.name: blocks}, uses.signs)
        use = Use(call, first.rule, first.name, arrived, origin=first.origin)
        super().__init__(uses.param, uses.batch_size, [use], loss_scale=uses.loss_scale)
        self.blocks_of_rows = blocks

    @property
    def only(self) -> Tensor:
        """The rows `[N, *p]` of the only block."""
        return next(iter(self.blocks_of_rows.values()))[0]

    @property
    def is_small(self) -> bool:
        """Whether there is one block, and what is asked of it costs more to begin than to do. Graphs stay apart."""
        return len(self.blocks_of_rows) == 1 and self.only.numel() <= FEW_NUMBERS and not torch.is_grad_enabled()

    def norm_squared(self) -> Tensor:
        rows = as_rows(self.only)
        return rows.square().sum(1) if torch.is_grad_enabled() else torch.linalg.vector_norm(rows, dim=1).square()

    def summed(self, weights: Tensor | None = None) -> Tensor:
        if weights is None or len(self.blocks_of_rows) > 1:
            return super().summed(weights)
        return weighted_sum(weights, self.only)


class Together(KeptRows):
    """Rows of several parameters side by side, as those of one: for what is the same sum over all their entries."""

    def __init__(self, kept: list[KeptRows]) -> None:
        self.params = [uses.param for uses in kept]
        rows = beside([uses.only for uses in kept], 1)
        super().__init__(kept[0], {next(iter(kept[0].blocks_of_rows)): rows[None]})
        self.param = rows[0]

    def parted(self, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What belongs to each parameter, in memory of its own."""
        for param, part in zip(self.params, value.split([p.numel() for p in self.params]), strict=True):
            yield param, part.clone().view(param.shape)


def lean(uses: Uses) -> Uses:
    """Uses that are kept until the pass is over: as rows, where these are smaller than what they are made of."""
    size = 0
    for use in uses.uses:
        for x in (*use.arrived.blocks.values(), *use.call.inputs):
            size += x.numel() if x.is_floating_point() else 0
    if uses.param.numel() * uses.count > size:
        kept = [u if u.rule.reads_output else replace(u, call=u.call.without_output()) for u in uses.uses]
        return Uses(uses.param, uses.batch_size, kept, loss_scale=uses.loss_scale)
    if uses.simple and len(uses.keys) == 1:
        return KeptRows(uses, {uses.keys[0]: uses.individual()[None]})
    return KeptRows(uses, {key: uses.rows(key) for key in uses.keys})


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
