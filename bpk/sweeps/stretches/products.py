"""Products with the second derivative of a stretch of plain autograd, contracted with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.second_order.probing import draw
from bpk.plan.graph import Source, pull_columns
from bpk.recording.graph.ports import OneSample, Port
from bpk.sweeps.stretches.no_second_derivative import not_differentiable, require_curvature


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
        return [g.new_zeros(len(columns[0]), *g.shape) if mat is None else mat for mat, g in known]

    @property
    def all_shapes(self) -> list[torch.Size]:
        """Of every target `[N, *x]`, then of every parameter."""
        return [*self.shapes, *[p.shape for p in self.source.trained]]

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
                explain(
                    f"A nonlinear function merges the batch axis: {self.grad.shape[0]} rows come from "
                    f"{self.shapes[0][0]}.",
                    "its second derivative is not known sample by sample.",
                    "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or use a GGN quantity.",
                )
            )

    def require_values_only(self) -> None:
        """Columns are found by eigenvalues of what autograd gives, and have no graph of their own."""
        if torch.is_grad_enabled():
            raise not_differentiable(self.source, "its second derivative is taken apart numerically")
