"""Functions that return what they are given: nodes of autograd's graph that belong to one call, or to nobody."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from bpk.recording import engine


class Keep(torch.autograd.Function):
    """Identity whose result shares memory and version with its input, but not its future.

    A tensor that is later changed in place moves on to a new graph node; this alias stays where the
    layer saw it, and stays differentiable (`create_graph`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.materialize_grads = False
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].view_as(tangents[0])


class Together(torch.autograd.Function):
    """Identity of several tensors: one graph node, which gets the gradients of all results of a layer at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        return tuple(x.detach() for x in tensors)  # not views: these must not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tangents)


alias, together = engine.applying(Keep), engine.applying(Together)
"""The functions themselves."""

IDENTITIES = (engine.node_class(Keep), engine.node_class(Together))
"""The classes of their nodes."""


def words(text: str) -> frozenset[str]:
    """The words of a text: names of functions."""
    return frozenset(text.split())


@lru_cache(maxsize=1024)
def name_of(kind: type) -> str:
    """What torch calls the function of a node of this class, without "Backward" and numbers (`""`: a user's)."""
    if issubclass(kind, IDENTITIES):
        return "Identity"
    head, _, number = kind.__name__.rpartition("Backward")
    return head if number.isdigit() and not issubclass(kind, BackwardCFunction) else ""
