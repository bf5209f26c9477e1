"""Tensors of calls inside of `torch.utils.checkpoint`: dropped after the forward pass, and computed again on demand.

Checkpointing (the kind that is not reentrant) replaces each tensor that autograd saves by a handle, and runs the
forward pass again when the first of them is needed. A record does the same with the tensors of its call. What runs
again saves the same tensors in the same order, so records are made then, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.recording import engine


class Placeholder(torch.autograd.Function):
    """Stands where a tensor is in autograd's graph, and takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Attach(torch.autograd.Function):
    """The values of one tensor, at the place of another one in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Recomputed:
    """Tensors by their handles."""

    def __init__(self, hooks: engine.SavedTensorHooks, tensors: Sequence[Tensor]) -> None:
        pack, self.unpack = hooks
        self.handles = [pack(x) for x in tensors]
        self.placeholders = [Placeholder.apply(x) if x.requires_grad else None for x in tensors]

    def tensors(self) -> list[Tensor]:
        """The tensors, computed again; once in each backward pass."""
        found = [self.unpack(handle) for handle in self.handles]
        with torch.enable_grad():
            return [
                x if place is None else Attach.apply(place, x)
                for x, place in zip(found, self.placeholders, strict=True)
            ]
