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

    def has_piece(self, inputs: Sequence[Tensor], edges: Sequence[Edge]) -> bool:
        """Whether the first input of a call that is given data is a part of the whole: it shares its memory."""
        for node, _ in edges:
            if node is not None:
                return False
        if not inputs or inputs[0].numel() >= self.size:
            return False
        plain = inputs[0].layout is self.whole.layout is torch.strided
        return plain and inputs[0].untyped_storage() is self.whole.untyped_storage()

    def is_turned(self, inputs: Sequence[Tensor], given: Sequence[torch.Size]) -> bool | None:
        """Whether the first input of a call has the second axis of data in front, where shapes do not tell.

        They do not if both axes have the same size, or are one axis. Values tell then, if the input is a view or a copy
        of the data; else its strides do, as those of a piece, and functions of entries hand them on. `None`: neither
        does.
        """
        shape = inputs[0].shape if inputs and self.axes is not None else ()
        if self.axes is None or not shape:
            return None
        n, m = self.axes
        square = n == m
        if not square and shape[0] != n * m:
            return None
        x, data = inputs[0].detach(), self.whole.detach()
        if x.layout is not torch.strided or data.layout is not torch.strided or x.is_meta:
            return None
        same = x.untyped_storage() is data.untyped_storage()
        if same and x.is_contiguous() and data.is_contiguous() and x.numel() == data.numel():
            return False
        if x.numel() == data.numel() and x.dtype == data.dtype and x.device == data.device:
            as_given, turned = (torch.equal(x.reshape(d.shape), d) for d in (data, data.transpose(0, 1)))
            if as_given or turned:
                return None if as_given and turned else turned
        if not square:
            return None
        if same and x.dim() < data.dim() and len(x) == len(data):
            ahead, behind = (x.stride(0) == step for step in data.stride()[:2])
            return None if ahead == behind else behind
        if x.shape[:2] != data.shape[:2] or [shape[:2] for shape in given].count(data.shape[:2]) > 1:
            return None
        return True if (x.stride(0) < x.stride(1)) != (data.stride(0) < data.stride(1)) else None
