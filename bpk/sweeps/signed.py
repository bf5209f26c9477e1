"""The sweep of the Hessian's diagonal: signed columns, with those of every residual on the way."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.products import Residual
from bpk.plan.step import Step
from bpk.plan.stretch import STRETCH, StretchCall
from bpk.sweeps.columns import ColumnSweep
from bpk.sweeps.enumerated import Enumerated
from bpk.sweeps.lazy import Chunk, LazyColumns, Starting, diagonal, known, split_rows
from bpk.sweeps.stretch_residual import StretchResidual


class SignedHessian(ColumnSweep):
    """Signed columns `U`, `s` with `H = sum_k s_k U_k U_k^T`: the Hessian of the loss at each output.

    The loss contributes its columns, each nonlinear call those of its residual (the second derivative contracted with
    the gradient); from there they travel like the square root of the GGN.
    """

    needs_gradients = True
    merges = True

    @property
    def key(self) -> Hashable:
        return ("hessian", self.samples)

    def starting(self, step: Step) -> list[Starting]:
        if step.is_loss:
            return [self.of_loss(step)]
        if step.rule is STRETCH:
            return list(self.of_stretch(step))
        return [self.split(step, lazy) for lazy in self.of_call(step)]

    def of_loss(self, step: Step) -> LazyColumns:
        """The Hessian of a loss, times its factor in the objective."""
        joint = step.joint
        root, signs = joint.rule.hessian_columns(joint.call)
        size = step.grad.abs().sqrt()
        columns: dict[Wrt, Tensor] = {k: self.rows(mat, 1) * size for k, mat in joint.split(root).items()}
        return self.split(step, known(columns, self.rows(signs, 1) * step.grad.sign(), "loss"))

    def of_call(self, step: Step) -> list[LazyColumns]:
        """The residual of a call, jointly over inputs and parameters that calls further up use as well; then those of
        the other parameters, one by one."""
        rule, view = step.rule, step.view(self.samples)
        assert rule is not None
        joint: tuple[Wrt, ...] = (*step.links, *step.reused)
        curved = [wrts for wrts in (joint, *((name,) for name in step.last)) if wrts]
        grad = None
        found = []
        for wrts in curved:
            kind = rule.residual(view, wrts)
            if kind is Residual.ZERO:
                continue
            grad = self.rows(step.grad) if grad is None else grad
            if isinstance(wrts[0], str) and wrts != joint:
                found.append(of_squares(rule.residual_squares(view, grad, wrts[0]), wrts[0]))
            elif kind is Residual.DIAGONAL and wrts == (0,) and self.at_most is not None:
                found.append(diagonal(rule.residual_diag(view, grad)))
            elif not step.reused and wrts == joint and (rows := Enumerated(step, self.samples, grad)).saves:
                found.append(rows.columns())
            else:
                found.append(known(*rule.signed_columns(view, grad, wrts), ("residual", *wrts)))
        return found

    def of_stretch(self, step: Step) -> list[LazyColumns]:
        """The residual of a stretch, in as many groups as it takes."""
        call = step.call
        assert isinstance(call, StretchCall)
        rows = None if call.merged else call.rows_by_sample()
        groups = StretchResidual(call.source, step.grad, rows, call.merged).groups()
        inputs = len(call.inputs)

        def considered(chunk: Chunk) -> Chunk:
            mats, signs = chunk
            names: list[Wrt] = [*range(inputs), *call.params]
            parts = {name: self.rows(mat, 1) for name, mat in zip(names, mats.values(), strict=True)}
            return parts, None if signs is None else self.rows(signs, 1)

        named = [LazyColumns(lazy.count, lazy.make, ("stretch", k)) for k, lazy in enumerate(groups)]
        return [lazy.mapped(considered) for lazy in named]

    def split(self, step: Step, lazy: LazyColumns) -> LazyColumns:
        """Columns for each row, where a sample has several."""
        if step.samples_of_rows is None:
            return lazy
        return split_rows(lazy, step.samples_of_rows, step.batch_size)


def of_squares(diag: Tensor, name: str) -> LazyColumns:
    """Two columns whose squares, with their signs, add up to `diag` `[N, *p]`: nothing else is made of these."""
    columns = torch.stack([diag.clamp(min=0), (-diag).clamp(min=0)]).sqrt()
    signs = diag.new_tensor([[1.0], [-1.0]]).expand(2, len(diag))
    return known({name: columns}, signs, ("residual", name))
