"""Which axes of a call hold the positions of a loss (time steps, pixels), as long as layers treat them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from bpk.plan.graph import REARRANGING
from bpk.plan.step import Link, Step
from bpk.plan.stretch import STRETCH


def at_producer(link: Link, mat: Tensor, where: Tensor) -> tuple[Step | None, Tensor, Tensor]:
    """The call that feeds an input, maybe through functions that rearrange entries, with columns there.

    `where` `[N, *x]` has the number of the position of each entry.
    """
    producer, numbers = link.producer, where.to(mat.dtype)[None]
    mat, numbers = link.back(mat), link.back(numbers)
    if producer.rule is not STRETCH:
        return producer, mat, numbers[0]
    source = producer.source
    if source is None or len(producer.links) != 1 or producer.params or not source.functions <= REARRANGING:
        return None, mat, numbers[0]
    producer.reached = True
    return producer.links[0].producer, source.pull(mat)[0], source.pull(numbers)[0][0]


def axes_of_positions(producer: Step, numbers: Tensor) -> int | None:
    """How many axes behind the batch axis tell positions apart at a call (`None`: they are mixed)."""
    record, rule, call = producer.record, producer.rule, producer.call
    if rule is None or len(record.inputs) != 1 or len(record.used) != 1 or len(call.inputs) != 1:
        return None
    looks_at = rule.acts_on(call)
    if looks_at is None:
        return None
    axes = leading_axes(numbers)
    free = call.inputs[0].dim() - looks_at - 1
    same = axes is not None and call.inputs[0].shape[: 1 + axes] == call.output.shape[: 1 + axes]
    return axes if axes is not None and same and axes <= free else None


def positions_of(shape: Sequence[int], axes: Sequence[int], device: torch.device) -> Tensor:
    """Numbers `[N, *x]` from 1 on of sample and position, where these axes tell positions apart."""
    kept = [size if axis == 0 or axis in axes else 1 for axis, size in enumerate(shape)]
    return (torch.arange(prod(kept), device=device).reshape(kept) + 1).expand(*shape)


def leading_axes(numbers: Tensor) -> int | None:
    """Behind how many axes numbers of positions are constant, if the axes before have one number for each entry."""
    for axes in range(numbers.dim()):
        front = numbers.flatten(0, axes).reshape(numbers.shape[: 1 + axes].numel(), -1)
        first = front[:, 0]
        if bool((front == first[:, None]).all()):
            return axes if bool((first > 0).all()) and len(first.unique()) == len(first) else None
    return None
