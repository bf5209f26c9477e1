"""The recursion of KFRA with second derivatives: `G <- mean_n J_n^T G J_n + sum_n R_n` (Chen, Chou, Chang, 2018).

`R_n` is the second derivative of a call for sample `n`, contracted with the gradient at its output. As it is, the
matrices stand for the Hessian; with the negative eigenvalues of `sum_n R_n` clipped, or made positive, for the
positive-curvature Hessian. Where layers are linear, and for one sample, biases get their exact block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.products import Residual
from bpk.plan.step import Link, Step
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.averaged.matrices import Averaged
from bpk.sweeps.curvature import Curvature
from bpk.sweeps.stretches.residual import StretchResidual


class AveragedHessian(Averaged):
    """Averaged matrices of a curvature that has residuals."""

    differentiates_twice = True

    def __init__(self, curvature: Curvature, mc_samples: int | None, samples: tuple[int, ...] | None) -> None:
        super().__init__(mc_samples, samples)
        self.curvature = curvature
        self.key = (self.key, curvature)

    def add_residual(self, step: Step) -> None:
        """Add the residual of a call, jointly over its inputs."""
        if isinstance(step.call, StretchCall):
            if step.call.source.is_linear:
                return
            found = StretchResidual(step.call.source, step.grad).columns()
            if found is not None:
                parts = found[0][: len(step.links)]
                self.add_columns(list(step.links.values()), [self.rows(x, 1) for x in parts], self.rows(found[1], 1))
            return
        wrts: tuple[Wrt, ...] = tuple(step.links)
        rule, view = step.seen(self.samples)
        kind = rule.residual(view, wrts) if wrts else Residual.ZERO
        if kind is Residual.ZERO:
            return
        links, grad = list(step.links.values()), self.rows(step.grad)
        if kind is Residual.DIAGONAL and wrts == (0,):
            total = rule.residual_diag(view, grad).sum(0).flatten()
            self.add_between(links[0], links[0], torch.diag_embed(self.modified(total)))
            return
        columns, signs = rule.residual_columns(view, grad, wrts)
        self.add_columns(links, [columns[wrt] for wrt in wrts], signs)

    def add_columns(self, links: Sequence[Link], columns: Sequence[Tensor], signs: Tensor) -> None:
        """Add `sum_nk s_kn u_kn u_kn^T` of columns `[K, N, *x]` to the blocks of these inputs."""
        flat = [part.reshape(signs.numel(), -1) for part in columns]
        side = torch.cat(flat, 1)
        matrix = self.modified((side * signs.reshape(-1, 1)).T @ side)
        sizes = [part.shape[1] for part in flat]
        for i, row in enumerate(matrix.split(sizes)):
            for j, block in enumerate(row.split(sizes, 1)):
                self.add_between(links[i], links[j], block)

    def modified(self, total: Tensor) -> Tensor:
        """A diagonal `[D]`, or a symmetric matrix `[D, D]`, as the curvature wants it."""
        if not self.curvature.is_positive:
            return total
        if total.dim() == 1:
            return self.curvature.positive(total)
        values, vectors = eigh((total + total.T) / 2)
        return (vectors * self.curvature.positive(values)) @ vectors.T
