"""The sweep of the Hessian's diagonal: signed columns, with those of every residual on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bpk.fields.arrived import ClosedForm, Use
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.products import Residual
from bpk.plan.samples.rows import to_samples
from bpk.plan.step import Step
from bpk.plan.stretch import STRETCH
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.columns.column_sweep import ColumnSweep
from bpk.sweeps.columns.diagonals import WaitingDiagonal, behind_diagonal, takes, tied_inside
from bpk.sweeps.columns.enumerated import Enumerated
from bpk.sweeps.columns.lazy import LazyColumns, StartingColumns, as_lazy, split_rows
from bpk.sweeps.columns.tangents import QuadraticForm, Tangents, by_sample_or_not, calls_behind, is_flat, summed
from bpk.sweeps.stretches.curved import CurvedStretch


class SignedHessian(ColumnSweep):
    """Signed columns `U`, `s` with `H = sum_k s_k U_k U_k^T`: the Hessian of the loss at each output.

    The loss contributes its columns, each nonlinear call those of its residual (the second derivative contracted with
    the gradient); from there they travel like the square root of the GGN.
    """

    merges = True
    differentiates_twice = True

    def prepare(self) -> None:
        super().prepare()
        self.diagonals: dict[Step, WaitingDiagonal] = {}
        self.is_done = False

    def may_be_closed(self, step: Step) -> bool:
        return True

    def on_the_way(self, step: Step) -> list[StartingColumns]:
        if self.is_done:
            return []
        if step.rule is None:
            raise UnsupportedLayer(
                f"The Hessian cannot pass {step.where}, which has a module extension and no rule.",
                "a module extension hands columns on, and does not tell the second derivative of its layer.",
                "register a rule for the layer instead: bpk.register(Autodiff(...)).",
            )
        if step.rule is STRETCH:
            return list(self.of_stretch(step))
        diag = self.diagonals.pop(step, None)
        if diag is not None:
            self.settle_diagonal(step, diag)
        if (near := self.near_diagonal(step, diag)) is not None:
            return [near]
        found = [] if diag is None else self.of_diagonal(step, diag)
        return found if self.is_done else [*found, *(self.split(step, lazy) for lazy in self.of_call(step))]

    def settle_diagonal(self, step: Step, diag: WaitingDiagonal) -> None:
        """What a diagonal at the output of a call brings to its parameters."""
        rule, view = step.seen(self.samples)
        step.reached = True
        for name in step.params:
            self.settle_squares(step, name, partial(rule.squares_of_diagonal, view, diag.values, name))

    def near_diagonal(self, step: Step, diag: WaitingDiagonal | None) -> LazyColumns | None:
        """The columns of what is curved at the input of a call, if that is a diagonal, for the call before, and few."""
        if not takes(step) or not is_flat(step, self.samples) or not self.may_start_later(step, step.call.output.dtype):
            return None
        rule, view = step.seen(self.samples)
        if rule.residual(view) is not Residual.GENERAL:  # then no gradient is asked for
            return None
        found = rule.curvature_behind(view, self.rows(step.grad), None if diag is None else diag.values)
        if found is None:
            return None
        self.start_later(step, WaitingDiagonal(found.diag))
        return as_lazy({0: found.columns}, found.signs, "near a diagonal")

    def of_diagonal(self, step: Step, diag: WaitingDiagonal) -> list[StartingColumns]:
        """What a diagonal at the output of a call sends to its input."""
        if not step.links:
            return []
        rule, view = step.seen(self.samples)
        behind = diag.behind(rule, view)
        if behind is None:
            columns = behind_diagonal(rule, view, diag)
            return [] if self.ends_with_tangents(step, diag, columns.count) else [columns]
        return [] if self.starts_later(step, behind) else [behind.columns()]

    def ends_with_tangents(self, step: Step, diag: WaitingDiagonal, count: int) -> bool:
        """Do all that is behind a call by tangents, if these are fewer."""
        run, deposits = self.run, self.deposits
        if run.uses or deposits is None or deposits.before or not is_flat(step, self.samples):
            return False
        diagonals = {step: diag.values} | {at: other.values for at, other in self.diagonals.items()}
        blocks = [block for waits in run.waiting.values() for block in waits.blocks.items()]
        count += sum(map(len, dict(blocks).values()))
        behind = calls_behind(self.plan, step, count, self.fields_are_rows or self.samples is not None)
        places = run.waiting.keys() | diagonals.keys()
        kinds = {mat.dtype for _, mat in blocks} | {values.dtype for values in diagonals.values()}
        if not behind or len(kinds) > 1 or not places <= {step, *behind}:
            return False
        forms = {at: QuadraticForm(diagonals.get(at), run.waiting.get(at)) for at in places}
        try:
            tangents = Tangents(self, step, behind, forms)
        except UnsupportedLayer:  # a function that is not differentiated as often
            return False
        if (waiting := run.waiting.get(step)) is not None:
            self.note(run.uses, step, waiting)
            self.settle_last(run.uses, step)
        for at in behind:
            at.reached = True
            for name in at.params:
                self.settle_squares(at, name, tangents.squares(at, name))
        run.waiting.clear()
        self.diagonals.clear()
        self.is_done = True
        return True

    def settle_squares(self, step: Step, name: str, squares: Callable[[bool], Tensor]) -> None:
        """Note what some columns add to the squares of a parameter."""
        rule, view = step.seen(self.samples)
        use = Use(view, rule, name, ClosedForm(squares), origin=(step.record, "squares"))
        self.settle(step.params[name], [use], step.batch_size)

    def starts_later(self, step: Step, diag: WaitingDiagonal) -> bool:
        """Leave a diagonal at the input of a call to the call before, where that has a shorter way."""
        if not self.may_start_later(step, diag.values.dtype):
            return False
        self.start_later(step, diag)
        return True

    def may_start_later(self, step: Step, dtype: torch.dtype) -> bool:
        """Whether the call before has a shorter way for a diagonal at the input of a call."""
        if self.deposits is None or step.samples_of_rows is not None or not step.links:
            return False
        at = step.links[0].producer
        return dtype is at.call.output.dtype and takes(at)

    def start_later(self, step: Step, diag: WaitingDiagonal) -> None:
        """Leave a diagonal at the input of a call to the call before."""
        link = step.links[0]
        back = diag.through(link)
        at = link.producer
        self.diagonals[at] = self.diagonals[at].plus(back) if at in self.diagonals else back

    def at_loss(self, step: Step) -> list[StartingColumns]:
        """The Hessian of a loss, times its factor in the objective."""
        joint = step.joint
        root, signs = joint.rule.hessian_columns(joint.call)
        columns: dict[Wrt, Tensor] = {k: self.rows(mat, 1) for k, mat in joint.split(root).items()}
        signs = self.rows(signs, 1)
        if step.grad.requires_grad or step.factor != 1:
            size = step.grad.abs().sqrt()
            columns, signs = {k: mat * size for k, mat in columns.items()}, signs * step.grad.sign()
        return [self.split(step, as_lazy(columns, signs, "loss"))]

    def of_call(self, step: Step) -> list[LazyColumns]:
        """The residual of a call, jointly over inputs and parameters that are used elsewhere as well, by calls further
        up or under another name; then those of the other parameters, one by one."""
        rule, view = step.seen(self.samples)
        shared = (*step.reused, *(tied := tied_inside(step)))
        joint: tuple[Wrt, ...] = (*step.links, *shared)
        curved = [wrts for wrts in (joint, *((name,) for name in step.last if name not in tied)) if wrts]
        grad = None
        found = []
        for wrts in curved:
            kind = rule.residual(view, wrts)
            if kind is Residual.ZERO:
                continue
            grad = self.rows(step.grad) if grad is None else grad
            if isinstance(wrts[0], str) and wrts != joint:
                squares = rule.residual_squares(view, grad, wrts[0])
                if step.samples_of_rows is not None:
                    squares = to_samples(squares[None], step.samples_of_rows, step.batch_size)[0]
                self.settle_squares(step, wrts[0], partial(by_sample_or_not, squares))
            elif kind is Residual.DIAGONAL and wrts == (0,) and self.at_most is not None:
                diag = WaitingDiagonal(rule.residual_diag(view, grad))
                found += [] if self.starts_later(step, diag) else [diag.columns()]
            elif not shared and wrts == joint and (rows := Enumerated(step, self.samples, grad)).saves:
                found.append(rows.columns())
            else:
                found.append(as_lazy(*rule.signed_columns(view, grad, wrts), ("residual", *wrts)))
        return found

    def of_stretch(self, step: Step) -> list[LazyColumns]:
        """The residual of a stretch, in as many groups as it takes; parameters that it uses last get squares."""
        call = step.call
        assert isinstance(call, StretchCall)
        if call.source.is_linear:
            return []
        stretch = CurvedStretch(step)
        per_sample = self.fields_are_rows or (self.samples is not None and not step.mixed)
        for name, squares in stretch.squares(per_sample).items():
            squares = self.rows(squares) if per_sample and not step.mixed else squares
            self.settle_squares(step, name, partial(by_sample_or_not if per_sample else summed, squares))
        diag = stretch.diagonal() if 0 in step.links and takes(step.links[0].producer) else None
        if diag is not None and self.starts_later(step, WaitingDiagonal(self.rows(diag))):
            return []
        return stretch.columns(self.rows)

    def split(self, step: Step, lazy: LazyColumns) -> LazyColumns:
        """Columns for each row, where a sample has several."""
        if step.samples_of_rows is None:
            return lazy
        return split_rows(lazy, step.samples_of_rows, step.batch_size)
