"""The value of a field, from all columns at once or from some after the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bpk.fields.sizes import different_sizes, require_same_samples, require_same_size
from bpk.fields.statistics import Uses
from bpk.jacobians.core.nested import mapped
from bpk.plan.quantity import Quantity

Parts = dict[str, dict[str, Tensor]]
"""By field: what adds up over batches, by name."""


def value_of(extension: Quantity, uses: Uses, adds_up: bool = False, keeps: Parts | None = None) -> Any:
    """What an extension makes of the uses of a parameter; says so where batches of different sizes meet.

    What processes will need beside the field is put into `keeps`. Nothing is in memory that changes with `.grad`.
    """
    if len(uses.uses) > 1:
        require_same_size(extension, uses)
    try:
        if uses.loss_scale != 1:
            value, parts = extension.unscaled(uses)
            if keeps is not None and not extension.adds_field:
                keeps[extension.savefield] = parts
            return value
        if keeps is not None and not extension.adds_field:
            keeps[extension.savefield] = apart_from_grad(extension.statistic(uses), uses)
        return apart_from_grad(extension.statistic(uses) if adds_up else extension.value(uses), uses)
    except RuntimeError as error:
        sizes = {use.call.batch_size for use in uses.uses if use.samples is None and use.call.inputs}
        if isinstance(error, NotImplementedError) or len(sizes) < 2:
            raise
        raise different_sizes(extension, sizes, uses.param) from error


def apart_from_grad(value: Any, uses: Uses) -> Any:
    """A value in memory of its own, where it has that of the gradient, or of the sum which autograd takes for it."""
    sums = uses.uses[0].call.sums
    if uses.gradient is None and not sums:
        return value
    taken = {x.untyped_storage().data_ptr() for x in (uses.gradient, *(sums or {}).values()) if x is not None}

    def own(x: Any) -> Any:
        shared = isinstance(x, Tensor) and x.layout is torch.strided and x.untyped_storage().data_ptr() in taken
        return x.clone() if shared else x

    return mapped(value, own)


class Stacked:
    """Rows `[V, N, *p]` of which `count` columns are there: memory for all, so that none is copied for the next."""

    def __init__(self, columns: int, uses: Uses) -> None:
        self.rows = uses.empty((columns, uses.count, *uses.param.shape), uses.param)
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

    def whole(self) -> Tensor:
        """All that have come."""
        return self.rows if self.count == len(self.rows) else self.rows[: self.count].clone()


def stack_for(columns: int | None, uses: Uses) -> Stacked | None:
    """Memory for so many columns in all, if more will come than these, and no graph is built."""
    if columns is None or torch.is_grad_enabled() or columns <= uses.lead[0]:
        return None
    return Stacked(columns, uses)


def combined(before: Any, extension: Quantity, uses: Uses, adds_up: bool = False) -> Any:
    """The value of an extension, from that of earlier columns and these; see `value_of`."""
    if isinstance(before, Stacked) and before.has_room(uses):
        uses.room = before.room(uses)
        before.add(value_of(extension, uses))
        uses.room = None
        return before
    earlier = before.whole() if isinstance(before, Stacked) else before
    value = value_of(extension, uses, adds_up)
    require_same_samples(extension, earlier, value, uses.param)
    return extension.combine(earlier, value)


def unshared(values: Mapping[int, Any], index: int) -> Any:
    """One of several values, as a tensor that may be overwritten: copied where another value is in the same memory."""
    value = values[index]
    if not isinstance(value, Tensor):
        return value
    here = value.untyped_storage().data_ptr()
    others = (other for number, other in values.items() if number != index and isinstance(other, Tensor))
    return value.clone() if any(other.untyped_storage().data_ptr() == here for other in others) else value
