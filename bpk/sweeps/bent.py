"""The recursion of KFRA with second derivatives: `G <- mean_n J_n^T G J_n + sum_n R_n` (Chen, Chou, Chang, 2018).

`R_n` is the second derivative of a layer for sample `n`, contracted with the gradient at its output. As it is, the
matrices stand for the Hessian; with the negative eigenvalues of `sum_n R_n` clipped, or made positive, for the
positive-curvature Hessian. Where layers are linear, and for one sample, biases get their exact block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from bpk.extensions.curvature import Curvature
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.rule import Residual
from bpk.jacobians.second_order.factoring import eigh
from bpk.plan.graph import Source
from bpk.sweeps.averaged import Averaged, end
from bpk.sweeps.residual import StretchResidual
from bpk.sweeps.sweeps import Step


class Bent(Averaged):
    """Averaged matrices of a curvature that has residuals."""

    def __init__(self, curvature: Curvature, mc_samples: int | None, samples: tuple[int, ...] | None) -> None:
        super().__init__(mc_samples, samples)
        self.curvature = curvature

    @property
    def key(self) -> Hashable:
        return (*super().key, self.curvature)  # type: ignore[misc]  # a tuple

    def bend(self, step: Step) -> None:
        """Add the residual of a call, jointly over its inputs."""
        wrts: tuple[Wrt, ...] = tuple(step.sources)
        kind = step.rule.residual(step.call, wrts) if wrts else Residual.ZERO
        if kind is Residual.ZERO:
            return
        keys, grad = [end(source) for source in step.sources.values()], self.rows(step.grad)
        if kind is Residual.DIAGONAL and wrts == (0,):
            total = step.rule.residual_diag(step.call, grad).sum(0).flatten()
            self.add(keys[0], keys[0], torch.diag_embed(self.modified(total)))
            return
        columns, signs = step.rule.residual_columns(step.call, grad, wrts)
        self.add_joint(keys, [columns[wrt] for wrt in wrts], signs)

    def bend_stretch(self, step: Step, source: Source) -> None:
        """Add the residual of the plain autograd before an input, jointly over all that feeds it."""
        if end(source) != id(source) or source.stretch is None:
            return
        share = step.rule.jac_t_mat_prod(step.full, step.grad[None], source.index)[0]
        found = StretchResidual(source, share).columns()
        if found is not None:
            keys = [*(id(record) for record, _ in source.targets), *map(id, source.trained)]
            self.add_joint(keys, [self.rows(part, 1) for part in found[0]], self.rows(found[1], 1))

    def add_joint(self, keys: Sequence[int], columns: Sequence[Tensor], signs: Tensor) -> None:
        """Add `sum_nk s_kn u_kn u_kn^T` of columns `[K, N, *x]` to the blocks of these tensors."""
        flat = [part.reshape(signs.numel(), -1) for part in columns]
        side = torch.cat(flat, 1)
        matrix = self.modified((side * signs.reshape(-1, 1)).T @ side)
        sizes = [part.shape[1] for part in flat]
        for i, row in enumerate(matrix.split(sizes)):
            for j, block in enumerate(row.split(sizes, 1)):
                self.add(keys[i], keys[j], block)

    def modified(self, total: Tensor) -> Tensor:
        """A diagonal `[D]`, or a symmetric matrix `[D, D]`, as the curvature wants it."""
        if self.curvature is Curvature.HESSIAN:
            return total
        change = torch.abs if self.curvature is Curvature.PCH_ABS else torch.relu
        if total.dim() == 1:
            return change(total)
        values, vectors = eigh((total + total.T) / 2)
        return (vectors * change(values)) @ vectors.T
