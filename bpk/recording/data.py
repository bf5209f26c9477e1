"""How what a call is given lies in the data that the whole model was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.recording.graph.nodes import Edge


class Data:
    """The first tensor that the whole model was given: calls that run meanwhile ask how their inputs lie in it."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.size = whole, whole.numel()
        axes = tuple(whole.shape[:2])
        self.axes = axes if len(axes) == 2 and 1 not in axes and not whole.is_meta else None
        """The sizes of the two axes that may be exchanged (`None`: they cannot be)."""

    def is_read(self, inputs: Sequence[Tensor], edges: Sequence[Edge]) -> bool:
        """Whether the first input of a call that is given data is the whole, or a part of it: it shares its memory."""
        for node, _ in edges:
            if node is not None:
                return False
        plain = bool(inputs) and inputs[0].layout is self.whole.layout is torch.strided
        return plain and inputs[0].untyped_storage() is self.whole.untyped_storage()

    def axis_in(self, inputs: Sequence[Tensor], given: Sequence[torch.Size]) -> int | None:
        """Along which axis of a call's first input the first axis of data runs, where shapes do not tell.

        They do not if another axis is as long, or if both axes of data are one axis: 1 stands for the order in which
        the second axis comes first, then. The strides of a view tell, or values of a copy; else the order of strides,
        which functions of entries hand on. `None`: none of these does.
        """
        shape = inputs[0].shape if inputs and self.axes is not None else ()
        if self.axes is None or not shape:
            return None
        n, m = self.axes
        if n != m and shape[0] != n * m and shape.count(n) < 2:
            return None
        x, data = inputs[0].detach(), self.whole.detach()
        if x.layout is not torch.strided or data.layout is not torch.strided or x.is_meta:
            return None
        all_of_it = x.numel() == data.numel()
        if x.untyped_storage() is data.untyped_storage():
            if all_of_it and x.is_contiguous() and data.is_contiguous():
                return 0
            steps = [(x.shape[axis], x.stride(axis)) for axis in range(x.dim())]
            if all_of_it and steps.count((n, data.stride(0))) == 1:
                return steps.index((n, data.stride(0)))
            if n == m == len(x) and x.dim() < data.dim() and data.stride(0) != data.stride(1):
                return data.stride()[:2].index(x.stride(0)) if x.stride(0) in data.stride()[:2] else None
        if all_of_it and x.dtype == data.dtype and x.device == data.device:
            orders = [torch.equal(x.reshape(d.shape), d) for d in (data, data.transpose(0, 1))]
            if any(orders):
                return None if all(orders) else orders.index(True)
        if n != m or x.shape[:2] != data.shape[:2] or [s[:2] for s in given].count(data.shape[:2]) > 1:
            return None
        return 1 if (x.stride(0) < x.stride(1)) != (data.stride(0) < data.stride(1)) else None
