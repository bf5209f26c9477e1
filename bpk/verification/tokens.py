"""Derivatives of the terms that a loss adds up for a sample, token by token, by plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from bpk.jacobians.losses.loss import Loss
from bpk.rules import REGISTRY
from bpk.verification.problem import NoReference
from bpk.verification.reference import Reference
from bpk.verification.split import Split, grads

SEVERAL = "tokens are those of one loss that bpk knows, with one prediction"


class TokenTerms:
    """The terms of the loss of a reference. A token is a row of the prediction, or one of its positions."""

    def __init__(self, ref: Reference) -> None:
        self.ref, self.split = ref, ref.split

    @cached_property
    def numbered(self) -> tuple[Tensor, int]:
        """The number of each entry's token `[P]` among those of its sample, and how many there are at most."""
        loss = self.split.points.loss
        rule = None if loss is None else REGISTRY.find(loss)
        if not isinstance(rule, Loss):
            raise NoReference(SEVERAL)
        x, axis, slot = rows_of(self.split)
        axes = rule.positions(x) if axis == 0 else ()
        sizes = [size if k in axes else 1 for k, size in enumerate(x.shape)]
        number = torch.arange(prod(sizes), device=x.device).reshape(sizes) + prod(sizes) * slot
        return number.expand(x.shape).flatten(), int(number.max()) + 1

    @property
    def outputs(self) -> Tensor:
        """The number of each entry `[P]` among those of its sample: each output of a row, at all rows of the sample."""
        x, axis, slot = rows_of(self.split)
        sizes = [1 if k == axis else size for k, size in enumerate(x.shape)]
        number = torch.arange(prod(sizes), device=x.device).reshape(sizes) * (int(slot.max()) + 1) + slot
        return number.expand(x.shape).flatten()

    def at(self, n: int, t: int) -> Tensor:
        """Which entries of the prediction belong to a token."""
        return (self.split.owner == n) & (self.numbered[0] == t)

    def gradients(self, name: str, n: int) -> Tensor:
        """`[T, P]`: the gradients of the terms of sample `n`, at all entries."""
        slope, param = self.split.slope.detach(), self.ref.params[name]
        found = [
            grads(self.split.pred, [param], torch.where(self.at(n, t), slope, 0.0))[0].flatten()
            for t in range(self.numbered[1])
        ]
        return torch.stack(found)

    def diagonals(self, columns: Tensor, chosen: Sequence[int]) -> Tensor:
        """`[len(chosen), T, E]`: diagonals of the GGN of each term, from columns `[E, P]` of the Jacobian."""
        if self.ref.drawn is None:
            each = torch.stack([self.by_token(column * self.split.loss_product(column)) for column in columns])
        else:
            each = torch.stack([self.by_token(columns * one) for one in self.ref.drawn]).square().sum(0)
        return each.movedim(0, -1)[list(chosen)]

    def by_token(self, x: Tensor) -> Tensor:
        """`[..., P]` summed over the entries of each token: `[..., N, T]`."""
        number, count = self.numbered
        n = self.split.n
        found = x.new_zeros(*x.shape[:-1], n * count).index_add(-1, self.split.owner * count + number, x)
        return found.unflatten(-1, (n, count))


def rows_of(split: Split) -> tuple[Tensor, int, Tensor]:
    """The prediction, the axis of its rows, and the number of each row `[R]` among those of its sample."""
    x = split.points.tensors[0]
    if x.numel() != len(split.owner):
        raise NoReference(SEVERAL)
    owner = split.owner.view(x.shape)
    whole = [k for k in range(x.dim()) if bool((owner == first_along(owner, k)).all())]
    if not whole:
        raise NoReference("rows of the prediction belong to several samples")
    rows, axis = first_along(owner, whole[0]).flatten().tolist(), whole[0]
    slot = torch.tensor([rows[:k].count(n) for k, n in enumerate(rows)], device=x.device)
    return x, axis, slot.reshape([-1 if k == axis else 1 for k in range(x.dim())])


def first_along(owner: Tensor, axis: int) -> Tensor:
    """The first entry at each index of an axis."""
    return owner[tuple(slice(None if k == axis else 1) for k in range(owner.dim()))]
