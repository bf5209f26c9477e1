"""The second derivative of a stretch of plain autograd, seen where it is smallest.

- Parameters that nothing further up uses need no columns, only a diagonal of their own.
- Where samples have several rows, rows that nothing couples are taken one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.plan.samples.rows import to_samples
from bpk.plan.step import Step
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, split_rows
from bpk.sweeps.stretches.residual import StretchResidual
from bpk.sweeps.stretches.squares import ParameterCurvature


class CurvedStretch:
    """The residual of a step that is a stretch, as signed columns and squares."""

    def __init__(self, step: Step) -> None:
        assert isinstance(step.call, StretchCall)
        self.step, self.call = step, step.call
        shared = tuple(step.params[name] for name in step.reused)
        self.source = replace(self.call.source, trained=shared)
        self.rows: Tensor | None = None
        """Whose the rows of the inputs are, where columns are found row by row."""
        self.starts_at_samples = False
        """Whether rows of the inputs are the samples, which is enough, whatever those of the output are."""
        self.residual: StretchResidual | None = None
        if self.source.targets or self.source.trained:
            self.residual = self.smallest()

    def smallest(self) -> StretchResidual:
        """The residual of all rows, or row by row, where that is right."""
        rows = None if self.call.merged else self.call.rows_by_sample()
        if rows is not None and not self.source.trained and all(some is None for some in self.call.rows_of_inputs):
            self.starts_at_samples = True
        elif rows is not None:
            if not self.may_go_by_row():
                return StretchResidual(self.source, self.step.grad, rows)
            self.rows = self.call.rows_of_all_inputs
        return StretchResidual(self.source, self.step.grad, merged=self.call.merged)

    def may_go_by_row(self) -> bool:
        """Whether rows, of which samples have several, may be taken for samples: nothing couples them."""
        rows, at_end = self.call.rows_of_all_inputs, self.call.samples_of_rows
        if rows is None or (self.source.trained and (at_end is None or not torch.equal(rows, at_end))):
            return False
        return StretchResidual(self.source, self.step.grad).couples_no_rows

    # ---- columns ------------------------------------------------------------------------------------
    def diagonal(self) -> Tensor | None:
        """The residual `[N, *in]`, if it is a diagonal one in a single input."""
        if self.residual is None or self.rows is not None:
            return None
        return self.residual.diagonal()

    def columns(self, considered: Callable[[Tensor, int], Tensor]) -> list[LazyColumns]:
        """Signed columns at the inputs and the shared parameters; `considered` restricts a tensor to some samples."""
        names: list[Wrt] = [*range(len(self.call.inputs)), *self.step.reused]
        kinds = [x.dtype for x in (*self.call.inputs, *(self.call.params[name] for name in self.step.reused))]

        def named(chunk: Chunk) -> Chunk:
            mats, signs = chunk
            # attention's scores may be in another precision than what they are made of
            each = [mat.to(kind) for mat, kind in zip(mats.values(), kinds, strict=True)]
            parts = {name: considered(mat, 1) for name, mat in zip(names, each, strict=True)}
            return parts, None if signs is None else considered(signs, 1)

        groups = [] if self.residual is None else self.residual.groups(self.starts_at_samples or self.rows is not None)
        found = [replace(lazy, name=("stretch", k)).mapped(named) for k, lazy in enumerate(groups)]
        return found if self.rows is None else [split_rows(lazy, self.rows, self.step.batch_size) for lazy in found]

    # ---- parameters ---------------------------------------------------------------------------------
    def squares(self, per_sample: bool) -> dict[str, Tensor]:
        """By name of a parameter that nothing further up uses: its diagonal, `[N, *p]` or the sum over samples."""
        found = {}
        for number, name in enumerate(self.call.params):
            if name in self.step.reused:
                continue
            curvature = ParameterCurvature(self.call.source, self.step.grad, number)
            if not curvature.is_zero:
                found[name] = self.of_samples(curvature) if per_sample else curvature.diagonal(by_row=False)
        return found

    def of_samples(self, curvature: ParameterCurvature) -> Tensor:
        """A diagonal for each sample."""
        if self.call.merged:
            return curvature.diagonal(by_row=False)[None]
        rows = curvature.diagonal(by_row=True)
        of = self.step.samples_of_rows
        return rows if of is None else to_samples(rows[None], of, self.step.batch_size)[0]
