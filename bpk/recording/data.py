"""How what a call is given lies in the data that the whole model was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.recording.graph.nodes import Edge


def is_piece(inputs: Sequence[Tensor], edges: Sequence[Edge], whole: Tensor) -> bool:
    """Whether the first input of a call that is given data is a part of a tensor: it shares its memory."""
    if not inputs or any(node is not None for node, _ in edges) or inputs[0].numel() >= whole.numel():
        return False
    plain = inputs[0].layout is whole.layout is torch.strided
    return plain and inputs[0].untyped_storage() is whole.untyped_storage()


def is_turned(inputs: Sequence[Tensor], whole: Tensor, given: Sequence[torch.Size]) -> bool | None:
    """Whether the first input of a call has the second axis of data in front, where shapes do not tell.

    They do not if both axes have the same size, or are one axis. Values tell then, if the input is a view or a copy of
    the data; else its strides do, as those of a piece, and functions of entries hand them on. `None`: neither does.
    """
    if whole.dim() < 2 or 1 in whole.shape[:2] or not inputs or not inputs[0].dim() or whole.is_meta:
        return None
    n, m = whole.shape[:2]
    square, flat = n == m, inputs[0].shape[0] == n * m
    if not (square or flat):
        return None
    x, data = inputs[0].detach(), whole.detach()
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
