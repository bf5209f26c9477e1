"""Positions of several uses of a parameter, each of which counts for itself (`approximation="expand"`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.fields.arrived import Use
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.products import add_up


def have_own_samples(uses: Sequence[Use]) -> bool:
    """Whether each sample is in one of several uses alone: a batch was given in parts."""
    known = [use.samples.unique() for use in uses if use.samples is not None]
    if len(uses) < 2 or len(known) < len(uses):
        return False
    return len(torch.cat(known).unique()) == sum(map(len, known))


def share_of_rows(use: Use, uses: Sequence[Use]) -> float:
    """The part of all rows of the batch that a use has: where others have other samples, it is not all of them."""
    return use.call.batch_size / sum(one.call.batch_size for one in uses) if have_own_samples(uses) else 1.0


def rows_of_positions(param: Tensor, uses: Sequence[Use], rows: Sequence[Tensor]) -> Tensor:
    """All rows `[R, G]`, from those of each use `[V, N, P, G]`: where uses have the same samples, they add up.

    Raises:
        UnsupportedLayer: If uses have other positions, or some samples in common.
    """
    if have_own_samples(uses):
        return torch.cat([each.flatten(0, -2) for each in rows])
    first = uses[0].samples
    alike = all(one.samples is first or equal(one.samples, first) for one in uses)
    if len({each.shape for each in rows}) > 1 or not alike:
        shapes = " and ".join(str(list(each.shape)) for each in rows)
        raise UnsupportedLayer(
            f"A parameter {list(param.shape)} has different numbers of positions, or other samples: {shapes}.",
            "with approximation='expand', uses add up position by position.",
            "leave out approximation=, which adds up the positions of each use first.",
        )
    return add_up(list(rows)).flatten(0, -2)


def equal(some: Tensor | None, others: Tensor | None) -> bool:
    """Whether rows are of the same samples."""
    return some is not None and others is not None and torch.equal(some, others)
