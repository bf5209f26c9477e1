"""Values whose columns come some at a time: rows go into memory for all, so that none is copied for the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpk.fields.statistics import Uses
from bpk.fields.values import Parts, value_of
from bpk.plan.quantity import Quantity


class Stacked:
    """Rows `[V, N, *p]` of which `count` columns are there."""

    def __init__(self, columns: int, uses: Uses) -> None:
        shape = (columns, uses.count, *uses.param.shape)
        spare, known = uses.spare, torch.Size(shape).numel()
        fits = spare is not None and spare.numel() == known and spare.dtype is uses.param.dtype
        self.rows = spare.view(shape) if spare is not None and fits else uses.param.new_empty(shape)
        self.count = 0

    def has_room(self, uses: Uses) -> bool:
        """Whether there is room for more columns, of as many samples."""
        return self.count + uses.lead[0] <= len(self.rows) and uses.lead[1] == self.rows.shape[1]

    def room(self, uses: Uses) -> Tensor:
        """Memory for more columns."""
        return self.rows[self.count : self.count + uses.lead[0]]

    def add(self, rows: Tensor) -> None:
        """Take more columns, which may be in that memory already."""
        part = self.rows[self.count : self.count + len(rows)]
        if not rows.is_set_to(part):
            part.copy_(rows)
        self.count += len(rows)


def combined(
    before: Any, extension: Quantity, uses: Uses, columns: int | None, adds_up: bool, keeps: Parts | None
) -> Any:
    """The value of an extension, from that of earlier columns (`None`: there are none) and these.

    `columns` says how many there will be in all, if that is known; for the rest see `value_of`.
    """
    first = before is None
    stacks = first and extension.stacks and not (adds_up or torch.is_grad_enabled())
    if stacks and columns is not None and columns > uses.lead[0]:  # others will come
        before = Stacked(columns, uses)
    if isinstance(before, Stacked) and before.has_room(uses):
        uses.spare, uses.room = None, before.room(uses)
        before.add(value_of(extension, uses, adds_up, keeps if first else None))
        uses.room = None
        return before
    if before is None:
        return value_of(extension, uses, adds_up, keeps)
    return extension.combine(whole(before), value_of(extension, uses, adds_up))


def whole(value: Any) -> Any:
    """A value, of stacked rows all that have come."""
    if not isinstance(value, Stacked):
        return value
    return value.rows if value.count == len(value.rows) else value.rows[: value.count].clone()
