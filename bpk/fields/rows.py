"""What one sweep has brought to one parameter, as rows: columns pulled back to the parameter, summed over its uses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE, Columns, Use
from bpk.fields.sums import are_few
from bpk.jacobians.core.call import index_of
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.families.no_rows import with_rows
from bpk.plan.parts import in_parts
from bpk.plan.samples.rows import to_samples

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R", bound="Rows")


def once(compute: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """A method of one argument at most, evaluated once for each value of it."""
    name, alone = compute.__name__, (compute.__name__, *(compute.__defaults__ or ()))

    @wraps(compute)
    def kept(self: R, *args: P.args, **named: P.kwargs) -> T:
        key = (name, *(args or named.values())) if args or named else alone
        if key not in self.known:
            self.known[key] = compute(self, *args, **named)
        found: T = self.known[key]
        return found

    return kept


class Rows:
    """All uses of one parameter in one backward pass, seen by one sweep.

    The `parameter` is seen as `param`: in parts, if it is complex. `batch_size` is the full batch's `N`, also where the
    sweep looks at some samples only. An active extension `keeps_rows`, or `keeps_samples` (squares of each sample), if
    it needs them anyway: others use these then. The loss was multiplied with `loss_scale`. `gradient` and `total` (of
    all parameters) are there for extensions that ask for them. Values may be written into the memory `spares`; rows
    belong in `room`, if there is one.
    """

    gradient: Tensor | None = None
    total: Any = None
    spares: list[Tensor] | None = None
    room: Tensor | None = None

    def __init__(
        self,
        param: Tensor,
        batch_size: int,
        uses: list[Use],
        keeps_rows: bool = False,
        keeps_samples: bool = False,
        loss_scale: float = 1,
    ) -> None:
        self.parameter, self.param = param, in_parts(param)
        self.batch_size, self.uses = batch_size, uses
        self.keeps_rows, self.keeps_samples = keeps_rows, keeps_samples
        self.loss_scale = loss_scale
        self.known: dict[Hashable, Any] = {}

    @property
    def keys(self) -> list[Hashable]:
        """The places where columns began, each of which names a block."""
        found: dict[Hashable, None] = {}
        for use in self.uses:
            found.update(dict.fromkeys([*use.arrived.blocks, *use.own]))
        return list(found)

    @property
    def signs(self) -> dict[Hashable, Tensor | None]:
        """The signs of each block, which are those of the place where it began."""
        found: dict[Hashable, Tensor | None] = self.uses[0].arrived.signs
        for use in self.uses[1:]:
            found = {**use.arrived.signs, **found}
        return found

    def signs_of(self, keys: Iterable[Hashable]) -> Tensor | None:
        """The signs of several blocks, one after the other (`None`: all ones)."""
        signs, keys = self.signs, list(keys)
        if not [key for key in keys if signs[key] is not None]:
            return None
        found = [(key, signs[key]) for key in keys]
        return concatenated([self.param.new_ones(self.first(key).shape[:2]) if x is None else x for key, x in found])

    def first(self, key: Hashable) -> Tensor:
        """A block `[V, N, ...]` where it has arrived first."""
        return next(block[key] for use in self.uses for block in (use.arrived.blocks, use.own) if key in block)

    @property
    def simple(self) -> bool:
        """Whether one call alone contributes, a row per sample, so that its rule's shortcuts apply."""
        use = self.uses[0]
        return len(self.uses) == 1 and use.samples is None and use.name not in use.arrived.of_params

    @property
    def few(self) -> bool:
        """Whether the rows of a single column are few: sum and squares are then those of the same rows."""
        use, single = self.uses[0], self.uses[0].arrived.single
        alone = single is not None and self.simple and not use.rule.finds_all_rows
        return alone and are_few(self.param, len(single), single)

    @property
    def shortcut(self) -> bool:
        """Whether squares are cheaper by the rule than from rows that are materialised anyway."""
        return self.simple and self.uses[0].rule.has_cheap_squares(self.uses[0].call, self.uses[0].name)

    @property
    def count(self) -> int:
        """How many samples the rows are those of: `N`, or as many as the sweep looks at."""
        use = self.uses[0]
        if use.samples is not None:
            return self.batch_size
        return next(iter((*use.arrived.blocks.values(), *use.own.values()))).shape[1]

    def of_samples(self: R, part: Sequence[int]) -> R:
        """The same for some samples, each named once, and for no others."""
        found = type(self)(self.param, len(part), [])
        chosen = index_of(part, self.param.device)
        for use in self.uses:
            rows, samples = chosen, None
            if use.samples is not None:
                place = torch.full((self.count,), -1, device=chosen.device)
                place[chosen] = torch.arange(len(part), device=chosen.device)
                rows = (place[use.samples] >= 0).nonzero()[:, 0]
                samples = place[use.samples[rows]]
            arrived = Columns({key: mat[:, rows] for key, mat in use.arrived.blocks.items()}, signs=use.arrived.signs)
            for key, own in use.own.items():
                arrived.add_to_parameter(use.name, key, own[:, chosen], use.arrived.signs[key])
            call = use.call.subset(rows.tolist()) if arrived.blocks else use.call
            found.uses.append(Use(call, with_rows(use.rule, call), use.name, arrived, samples, use.origin))
        return found

    def columns_of(self, key: Hashable) -> int:
        """How many columns a block has."""
        return len(self.first(key))

    def of_columns(self: R, key: Hashable, part: slice) -> R:
        """The same for some columns of a block, and for no others."""
        found, signs = list[Use](), self.signs[key]
        signs = None if signs is None else signs[part]
        for use in self.uses:
            arrived = Columns()
            if key in use.arrived.blocks:
                arrived.add(key, use.arrived.blocks[key][part], signs)
            if key in use.own:
                arrived.add_to_parameter(use.name, key, use.own[key][part], signs)
            if arrived.signs:
                found.append(replace(use, arrived=arrived))
        return type(self)(self.param, self.batch_size, found)

    @once
    def rows(self, key: Hashable) -> Tensor:
        """`[V, N, *p]`: the columns of one block, pulled back to the parameter and summed over its uses."""
        total: Tensor | None = None
        for use in self.uses:
            parts = []
            if key in use.arrived.blocks:
                together = use.samples is not None and self.batch_size == 1  # all rows are those of one sample
                rows = use.rule.jac_t_mat_prod(use.call, use.arrived.blocks[key], use.name, sum_batch=together)
                parts.append(rows[:, None] if together else self.by_sample(rows, use))
            if key in use.own:
                parts.append(use.own[key])
            for part in parts:
                total = part if total is None else total + part
        assert total is not None
        return total

    def by_sample(self, rows: Tensor, use: Use) -> Tensor:
        """Rows `[V, R, ...]` of a call as rows `[V, N, ...]` of samples."""
        return rows if use.samples is None else to_samples(rows, use.samples, self.batch_size)

    def blocks(self) -> list[tuple[Tensor, Tensor | None]]:
        """The columns of the only use with their signs, small blocks joined."""
        mats: dict[Hashable, Tensor] = self.uses[0].arrived.blocks
        if len(mats) == 1:
            ((key, mat),) = mats.items()
            return [(mat, self.uses[0].arrived.signs[key])]
        joined, size = list[list[Hashable]](), 0  # of the last one
        for key, mat in mats.items():
            if not joined or size + mat.numel() > PIECE:
                joined, size = [*joined, []], 0
            joined[-1].append(key)
            size += mat.numel()
        return [(concatenated([mats[key] for key in keys]), self.signs_of(keys)) for keys in joined]

    @once
    def all_rows(self) -> Tensor:
        """`[V, N, *p]` over all blocks."""
        if not self.simple:
            return concatenated([self.rows(key) for key in self.keys])
        if self.uses[0].arrived.single is not None:
            return self.individual()[None]
        use, blocks = self.uses[0], self.blocks()
        first = blocks[0][0]
        into = self.room if self.room is not None and self.room.dtype is first.dtype else None
        if len(blocks) == 1 and into is None:
            return self.rows_of(use, first, self.spares)
        mats = [mat for mat, _ in blocks]
        if torch.is_grad_enabled():
            return concatenated([self.rows_of(use, mat, None) for mat in mats])
        shape = (sum(map(len, mats)), *mats[0].shape[1:2], *use.call.params[use.name].shape)
        rows = self.empty(shape, mats[0]) if into is None else into
        for mat, part in zip(mats, rows.split([len(mat) for mat in mats]), strict=True):
            found = self.rows_of(use, mat, [part.view(-1)])
            if not found.is_set_to(part):
                part.copy_(found.clone())
        return rows

    @once
    def individual(self) -> Tensor:
        """`[N, *p]`: the rows of a single column. Their sum is noted if somebody wants it."""
        use = self.uses[0]
        if not self.simple or use.arrived.single is None:
            return self.all_rows()[0]
        use.call.spares = self.spares
        rows = use.rule.individual(use.call, use.arrived.single, use.name)
        use.call.spares = None
        add = None if use.call.sums is None else use.call.summing(use.name)
        if add is not None:
            add(rows.sum(0))
        return rows

    def rows_of(self, use: Use, mat: Tensor, spares: list[Tensor] | None) -> Tensor:
        """The rows of some columns, written into spare memory where the rule can."""
        use.call.spares = spares
        rows = use.rule.jac_t_mat_prod(use.call, mat, use.name, sum_batch=False)
        use.call.spares = None
        return rows

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for rows: that of an earlier field, where they fit in."""
        call = self.uses[0].call
        call.spares = self.spares
        found = call.empty(shape, like)
        call.spares = None
        return found
