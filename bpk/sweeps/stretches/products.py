"""Products with the second derivative of a stretch of plain autograd, contracted with a gradient; dense, by sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.second_order.factoring import factor
from bpk.jacobians.second_order.probing import draw
from bpk.plan.graph import Source, pull_columns
from bpk.plan.parts import in_parts
from bpk.recording.graph.ports import OneSample, Port
from bpk.sweeps.stretches.no_second_derivative import not_differentiable, require_curvature

Group = tuple[list[Tensor], Tensor]
"""Columns `[K, N, *target]` for each target, then `[K, N, *p]` for each parameter, and signs `[K, N]`."""


class StretchProducts:
    """`R`, the second derivative of `<grad, stretch(x_1, ..., p_1, ...)>` in targets `x` and parameters `p`.

    Args:
        source: The stretch.
        grad: The gradient at its end, as the consumer's rule sees it.
        rows: For the consumer, then for each target, which rows are those of sample `n` (left out: row `n`).
        merged: Whether all rows are those of one sample. Inside, this sample has an axis of its own in front of them.
    """

    def __init__(
        self, source: Source, grad: Tensor, rows: Sequence[Sequence[Tensor]] | None = None, merged: bool = False
    ) -> None:
        require_curvature(source)
        self.source = source
        self.merged = merged
        self.exits: list[Port | OneSample] = [OneSample(port) if merged else port for port in source.exits]
        self.at_end, self.grad = grad, grad[None] if merged else grad
        self.rows = rows
        self.gradients = self.pulled(self.grad.detach())
        self.shapes = [p.one_to_rule(g).shape for p, g in zip(self.exits, self.gradients, strict=False)]

    def pulled(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient at the beginnings, from one at the end."""
        return self.source.gradients(grad[0] if self.merged else grad)

    # ---- products --------------------------------------------------------------------------------
    def product(self, mats: Sequence[Tensor]) -> list[Tensor]:
        """Columns `[K, N, *target]` by target, and `[K, *p]` by parameter, times `R`.

        Columns may be left out from behind; results are there for all.
        """
        given = [p.to_graph(m) for p, m in zip(self.exits, mats, strict=False)] + [*mats[len(self.shapes) :]]
        pairs = [(g, m) for g, m in zip(self.gradients, given, strict=False) if g.requires_grad]
        k = len(mats[0])
        if not pairs:
            return [self.grad.new_zeros(k, *shape) for shape in self.all_shapes]
        ends, columns = [g for g, _ in pairs], [m for _, m in pairs]
        full = self.pull(ends, columns)
        seen = [port.to_rule(f) for port, f in zip(self.exits, full, strict=False)]
        return [*seen, *full[len(seen) :]]

    def pull(self, ends: Sequence[Tensor], columns: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Columns from `ends` back to the beginnings from number `first` on, zero where nothing depends on them."""
        beginnings = [*self.source.beginnings()[first:], *self.source.beside]
        found = pull_columns(ends, beginnings, columns, create_graph=False)
        known = zip(found, self.gradients[first:], strict=False)
        return [g.new_zeros(len(columns[0]), *g.shape) if mat is None else in_parts(mat) for mat, g in known]

    def pull_units(self, ends: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """One column for each number in `ends`, back to the beginnings from number `first` on.

        Each end gets columns with memory of their own: torch refuses to look at pairs of numbers as complex ones where
        they begin at an odd place, as those of an end do that others of odd size stand in front of in one tensor.
        """
        sizes = [end.numel() for end in ends]
        count = sum(sizes)
        units = torch.eye(count, dtype=ends[0].dtype, device=ends[0].device).split(sizes, 1)
        columns = [u.reshape(count, *end.shape).to(end.dtype).contiguous() for u, end in zip(units, ends, strict=True)]
        known = [(end, mats) for end, mats in zip(ends, columns, strict=True) if end.requires_grad]
        if not known:
            return [g.new_zeros(count, *g.shape) for g in self.gradients[first:]]
        return self.pull([end for end, _ in known], [mats for _, mats in known], first)

    @property
    def of_trained(self) -> list[torch.Size]:
        """The shapes of the parameters."""
        return [in_parts(p).shape for p in self.source.trained]

    @property
    def all_shapes(self) -> list[torch.Size]:
        """Of every target `[N, *x]`, then of every parameter."""
        return [*self.shapes, *self.of_trained]

    @cached_property
    def is_zero(self) -> bool:
        """Whether the stretch is linear here (tried with a random vector)."""
        if not any(g.requires_grad for g in self.gradients):
            return True
        found = self.product([draw((1, *shape), self.grad, k) for k, shape in enumerate(self.all_shapes)])
        if any(bool(mat.any()) for mat in found):
            return False
        if not torch.is_grad_enabled():
            return True
        with torch.no_grad():  # where a gradient is zero, and products are, their derivatives need not be
            grad = draw(self.at_end.shape, self.at_end, 0)
            return StretchProducts(self.source, grad, self.rows, self.merged).is_zero

    def require_samples(self) -> None:
        """Without known rows, those of targets must be the samples, like those at the end."""
        if self.rows is None and any(shape[0] != self.grad.shape[0] for shape in self.shapes):
            raise UnsupportedLayer(
                f"A nonlinear function merges the batch axis: {self.grad.shape[0]} rows come from {self.shapes[0][0]}.",
                "its second derivative is not known sample by sample.",
                "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or use a GGN quantity.",
            )

    def require_values_only(self) -> None:
        """Products, and what is found of them (columns, by eigenvalues), have no graph of their own."""
        if torch.is_grad_enabled():
            raise not_differentiable(self.source, "its second derivative is taken apart numerically")

    # ---- one sample after the other: dense, over all of its rows ------------------------------------
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
        full = self.pull_units([*own, *gradients[len(own) :]])
        parts = [port.to_rule(mat) for port, mat in zip(exits, full, strict=False)]
        targets = [filled(mat[:, rows], size, 1) for mat, rows, size in zip(parts, at, most, strict=True)]
        return torch.cat([mat.reshape(len(mat), -1) for mat in (*targets, *full[len(targets) :])], 1)

    def by_parameter(self, flat: Tensor) -> list[Tensor]:
        """`[..., all parameters]` as `[..., *p]` of each."""
        parts = flat.split([shape.numel() for shape in self.of_trained], -1)
        return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, self.of_trained, strict=True)]


def filled(x: Tensor, size: int, axis: int) -> Tensor:
    """A tensor with zeros behind it along an axis."""
    missing = size - x.shape[axis]
    return torch.cat([x, x.new_zeros(*x.shape[:axis], missing, *x.shape[axis + 1 :])], axis) if missing else x
