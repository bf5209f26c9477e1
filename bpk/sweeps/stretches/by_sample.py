"""The second derivative of a stretch of plain autograd, one sample after the other: dense, over all of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.second_order.factoring import factor
from bpk.sweeps.stretches.products import StretchProducts

Group = tuple[list[Tensor], Tensor]
"""Columns `[K, N, *target]` for each target, then `[K, N, *p]` for each parameter, and signs `[K, N]`."""


class SampleBySample(StretchProducts):
    """`R` of every sample, jointly over targets and parameters."""

    def by_sample(self, balanced: bool) -> Group:
        """Eigendecomposition of the dense matrix of every sample, jointly over targets and parameters."""
        in_order = torch.arange(len(self.grad), device=self.grad.device)[:, None]
        end, *starts = [in_order] * (1 + len(self.shapes)) if self.rows is None else self.rows
        most = [max(map(len, start)) for start in starts]
        dense = [self.of_sample(end[n], [start[n] for start in starts], most) for n in range(len(end))]
        vectors, signs = factor(torch.stack(dense), balanced)
        inner = [size * shape[1:].numel() for size, shape in zip(most, self.shapes, strict=True)]
        *parts, own = vectors.split([*inner, vectors.shape[2] - sum(inner)], 2)
        found = [part.new_zeros(len(part), *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        for columns, part, start, size in zip(found, parts, starts, most, strict=True):
            each = part.reshape(*part.shape[:2], size, *columns.shape[2:])
            for n, at in enumerate(start):
                columns[:, at] = each[:, n, : len(at)]
        return [*found, *self.by_parameter(own)], signs

    def of_sample(self, here: Tensor, at: Sequence[Tensor], most: Sequence[int]) -> Tensor:
        """The matrix `[D, D]` of one sample.

        The sample's rows are `here` at the consumer, and `at[k]` at target `k`, with zeros behind them up to `most[k]`.
        """
        of_sample = torch.zeros_like(self.grad)
        of_sample[here] = self.grad[here]
        gradients, exits = self.pulled(of_sample), self.exits
        with torch.enable_grad():
            seen = [port.one_to_rule(g) for port, g in zip(exits, gradients, strict=False)]
            own = [filled(g[rows], size, 0) for g, rows, size in zip(seen, at, most, strict=True)]
            flat = torch.cat([g.flatten() for g in (*own, *gradients[len(own) :])])
        unit = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
        if not flat.requires_grad:
            return torch.zeros_like(unit)
        full = self.pull((flat,), (unit,))
        parts = [port.to_rule(mat) for port, mat in zip(exits, full, strict=False)]
        targets = [filled(mat[:, rows], size, 1) for mat, rows, size in zip(parts, at, most, strict=True)]
        return torch.cat([mat.reshape(len(mat), -1) for mat in (*targets, *full[len(targets) :])], 1)

    def by_parameter(self, flat: Tensor) -> list[Tensor]:
        """`[..., all parameters]` as `[..., *p]` of each."""
        parts = flat.split([p.numel() for p in self.source.trained], -1)
        return [part.reshape(*part.shape[:-1], *p.shape) for part, p in zip(parts, self.source.trained, strict=True)]


def filled(x: Tensor, size: int, axis: int) -> Tensor:
    """A tensor with zeros behind it along an axis."""
    missing = size - x.shape[axis]
    return torch.cat([x, x.new_zeros(*x.shape[:axis], missing, *x.shape[axis + 1 :])], axis) if missing else x
