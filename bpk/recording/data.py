"""How what a call is given lies in the data that the whole model was given."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import permutations

import torch
from torch import Tensor

from bpk.recording.graph.nodes import Edge

GIVEN = "bpk.given"
"""Under which name the nodes of a model's results keep the shapes of what it was given."""

SOME, MANY = 8, 64
"""Of how many rows, along each of two axes, and of how many of their entries the order is looked at."""

ENOUGH = 8
"""From how many pairs of entries on their order tells more than strides: a copy has forgotten those of data."""

MOST_AXES = 5
"""Of data whose axes are looked for in another order."""


class Data:
    """The first tensor that the whole model was given: calls ask how their inputs lie in it.

    Calls written down from the graph ask later. Where no other call with parameters has seen data, it is `kept`.
    """

    def __init__(self, whole: Tensor) -> None:
        self.ref, self.size = weakref.ref(whole), whole.numel()
        self.is_seen = False
        self.kept: Tensor | None = None
        axes = tuple(whole.shape[:2])
        self.axes = axes if len(axes) == 2 and 1 not in axes and not whole.is_meta else None
        """The sizes of the two axes that may be exchanged (`None`: they cannot be)."""

    @property
    def whole(self) -> Tensor:
        """The tensor."""
        found = self.ref()
        assert found is not None
        return found

    @property
    def is_there(self) -> bool:
        """Whether anybody has it still."""
        return self.ref() is not None

    def keep(self) -> None:
        """The model's pass is over: if no call has seen data, those that nobody has noted may want to.

        What has a graph is a prediction, given to a loss: it would lead from the graph to what its nodes own.
        """
        self.kept = None if self.is_seen or self.whole.requires_grad else self.whole

    def is_read(self, inputs: Sequence[Tensor], edges: Sequence[Edge]) -> bool:
        """Whether the first input of a call that is given data is the whole, or a part of it: it shares its memory."""
        for node, _ in edges:
            if node is not None:
                return False
        plain = bool(inputs) and inputs[0].layout is self.whole.layout is torch.strided
        return plain and inputs[0].untyped_storage() is self.whole.untyped_storage()

    def axis_in_view(self, x: Tensor) -> int | None:
        """Along which axis of a view of data its first axis runs, by strides.

        Of a view that has both as one axis, and of a part with the second axis in front, it is called 1.
        """
        if self.axes is None:
            return None
        n, m = self.axes
        first, second = self.whole.stride()[:2]
        steps = list(zip(x.shape, x.stride(), strict=True))
        if x.numel() == self.size:
            if x.is_contiguous() and self.whole.is_contiguous():
                return 0
            return steps.index((n, first)) if steps.count((n, first)) == 1 else self.axis_in_copy(x, ())
        if x.numel() > self.size:  # expanded along an axis of its own
            return steps.index((n, first)) if steps.count((n, first)) == 1 else None
        if not steps or x.dim() >= self.whole.dim() or first == second:
            return None
        return 0 if steps[0] == (n, first) else 1 if steps[0] == (m, second) else None

    def axis_in_copy(self, x: Tensor, given: Sequence[torch.Size]) -> int | None:
        """The same of what was computed from data, where shapes do not tell: a copy, or a function of its entries.

        They do not if another axis is as long, or if both axes of data are one axis. The values of a copy tell, else
        the order of strides, which functions of entries hand on, or that of the values in a row, which normalisations
        and rising functions of entries keep. `None`: none of these does.
        """
        if self.axes is None or not x.dim():
            return None
        (n, m), shape, data = self.axes, x.shape, self.whole.detach()
        if n != m and shape[0] != n * m and shape.count(n) < 2:
            return None
        if x.layout is not torch.strided or data.layout is not torch.strided or x.is_meta:
            return None
        all_of_it = x.numel() == self.size
        if all_of_it and x.dtype == data.dtype and x.device == data.device:
            axes = {axis for axis, order in orders_of(data, shape) if torch.equal(x.reshape(order.shape), order)}
            if axes:
                return axes.pop() if len(axes) == 1 else None
        if [other[:2] for other in given].count(data.shape[:2]) > 1:
            return None
        if x.dim() == data.dim() and all_of_it:
            by_strides = moved(x, data)
            if n != m or x.shape != data.shape:
                return by_strides
            by_values, count = ranked(x, data)
            return by_values if by_strides is None or (by_values is not None and count >= ENOUGH) else by_strides
        if n != m or shape[:2] != data.shape[:2]:
            return None
        return 1 if (x.stride(0) < x.stride(1)) != (data.stride(0) < data.stride(1)) else None


class Given(tuple[torch.Size, ...]):
    """The shapes of the tensors that the whole model was given; `data` is the first of these."""

    data: Data | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Given:
        """From the tensors."""
        given = cls(x.shape for x in tensors)
        given.data = Data(tensors[0]) if tensors else None
        return given


NOTHING_GIVEN = Given()
"""What no model was given."""


def orders_of(data: Tensor, shape: torch.Size) -> Iterator[tuple[int, Tensor]]:
    """Data with its axes in all orders that may have this shape, and where the first one is; both as one, last."""
    if len(shape) == data.dim() <= MOST_AXES:
        for order in permutations(range(data.dim())):
            if [data.shape[axis] for axis in order] == list(shape):
                yield order.index(0), data.permute(order)
    if shape[0] == data.shape[0] * data.shape[1]:
        yield 0, data
        yield 1, data.transpose(0, 1)


def moved(x: Tensor, data: Tensor) -> int | None:
    """Where the first axis of data is among the axes of what functions of its entries have made, if it was moved."""
    ours, theirs = (sorted(range(t.dim()), key=t.stride, reverse=True) for t in (x, data))
    if ours == theirs or [x.shape[axis] for axis in ours] != [data.shape[axis] for axis in theirs]:
        return None
    return ours[theirs.index(0)]


def ranked(x: Tensor, data: Tensor) -> tuple[int | None, int]:
    """Where the first axis of data is, if rows of a function of it rank their entries as those of data at one place.

    And how many pairs of entries say so. Entries may have become equal (ReLU), and the order may be the contrary.
    """
    if data.dim() < 3 or data.is_complex() or x.is_complex():
        return None, 0
    ours, theirs = (t[:SOME, :SOME].flatten(2)[..., :MANY] for t in (x, data))
    steps = [ours.gather(2, order.argsort(2)).diff(dim=2) for order in (theirs, theirs.transpose(0, 1))]
    rows, moved_rows = (bool((step >= 0).all() or (step <= 0).all()) for step in steps)
    return (None if rows == moved_rows else int(moved_rows)), int((steps[0] != 0).sum())
