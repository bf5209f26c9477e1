"""Batches of different sizes that meet at a parameter: sample `n` of each is taken for the same one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor

from bpk.fields.arrived import Columns
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.quantity import Quantity


def require_same_size(what: object, uses: Uses) -> None:
    """Refuse columns that have come to uses of a parameter with different numbers of samples: one would be repeated."""
    if all(isinstance(use.arrived, Columns) for use in uses.uses):
        for key in uses.keys:
            sizes = sizes_of(uses, [key])
            if len(sizes) > 1:
                raise different_sizes(what, sizes, uses.param)


def sizes_of(uses: Uses, keys: Iterable[Hashable]) -> set[int]:
    """How many samples columns have that began at some places."""
    found = set[int]()
    for key in keys:
        for use in uses.uses:
            if key in use.arrived.blocks:
                found.add(use.arrived.blocks[key].shape[1] if use.samples is None else uses.batch_size)
            if key in use.own:
                found.add(use.own[key].shape[1])
    return found


def require_same_samples(extension: Quantity, before: Any, value: Any, param: Tensor) -> None:
    """Refuse values `[N, ...]` (or columns of these) that two losses have given for different numbers of samples."""
    if (extension.needs_rows or extension.needs_samples) and isinstance(before, Tensor) and isinstance(value, Tensor):
        axis = 1 if extension.stacks else 0
        sizes = {x.shape[axis] for x in (before, value)}
        if len(sizes) > 1:
            raise different_sizes(extension, sizes, param)


def different_sizes(what: object, sizes: Iterable[int], param: Tensor) -> UnsupportedLayer:
    """The refusal."""
    return UnsupportedLayer(
        f"{what} met batches of {' and '.join(map(str, sorted(sizes)))} samples at a parameter {list(param.shape)}.",
        "sample n of each is taken for the same one, as in a Siamese network, and these have different sizes.",
        "use one backward pass for each batch.",
    )
