"""The sweep of the Hessian's diagonal: signed columns, with those of every residual on the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import torch
from torch import Tensor

from bpk.fields.parameters import is_trained
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import Source
from bpk.recording.record import Record
from bpk.sweeps.born import Born, diagonal, known, split_rows
from bpk.sweeps.columns import ColumnSweep
from bpk.sweeps.residual import StretchResidual
from bpk.sweeps.sweeps import Columns, Step, add_direct

Send = Callable[[Hashable, Mapping[Wrt, Tensor], Tensor | None], None]
"""Hands on some columns under a key, with their signs."""


class SignedHessian(ColumnSweep):
    """Signed columns `U`, `s` with `H = sum_k s_k U_k U_k^T`: the Hessian of the loss at each output.

    The loss contributes its own columns, each nonlinear layer those of its residual (the second derivative
    contracted with the gradient); from there they travel like the square root of the GGN. Before columns become too
    many, those under way go all the way back in a round of their own.
    """

    def __init__(self, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples)
        self.under_way = 0  # columns that may wait somewhere
        self.ahead = False  # whether some have gone ahead

    @property
    def key(self) -> Hashable:
        return ("hessian", self.samples)

    def hand_over(self, record: Record) -> Tensor:
        raise self.no_module_extension(record)

    def start(self, step: Step, loss: Loss) -> None:
        joint = step.joint(loss)
        root, signs = joint.rule.hessian_columns(joint.call)
        columns: dict[Wrt, Tensor] = dict(joint.split(root).items())
        scaled: dict[Wrt, Tensor] = {k: self.rows(mat, 1) * step.grad.abs().sqrt() for k, mat in columns.items()}
        signs = self.rows(signs, 1) * step.grad.sign()
        self.emit(step, "loss", self.split(step, known(scaled, signs)), partial(self.send_to_inputs, step, None))
        for index, source in step.sources.items():
            for name, born in self.bent(step, index):
                self.emit(step, name, born, partial(self.send_from_stretch, source))

    def carry(self, step: Step) -> Columns:
        return super().visit(step)

    def arrived(self, step: Step) -> Columns:
        if self.ahead and id(step.record) not in self.waiting:
            return Columns()  # all that came has gone ahead
        columns: Columns = super().arrived(step)
        return columns

    def visit(self, step: Step) -> Columns:
        joint: tuple[Wrt, ...] = (*step.sources, *step.reused)
        curved = bool(joint) and step.rule.residual(step.call, joint) is not Residual.ZERO
        own = self.born(step, joint) if curved else None
        bent = [(name, born, source) for k, source in step.sources.items() for name, born in self.bent(step, k)]
        # make room first: what has arrived must not go ahead while its share of reused parameters is not collected
        self.make_room(step, sum(born.count for _, born, _ in bent) + (own.count if own is not None else 0))
        columns, bound = super().visit(step), bool(step.reused)
        for name, param in step.record.params.items():
            if is_trained(param) and name not in step.reused:
                self.add_curvature(step, name, columns)
        for group, born, source in bent:
            self.emit(step, group, born, partial(self.send_from_stretch, source), bound)
        if own is not None:
            self.emit(step, "residual", own, partial(self.send_to_inputs, step, columns), bound)
        return columns

    def born(self, step: Step, wrts: tuple[Wrt, ...]) -> Born:
        """The columns of a call's residual, jointly over inputs and parameters."""
        grad = self.rows(step.grad)
        alone = wrts == (0,) and step.at_most is not None
        if alone and step.rule.residual(step.call, wrts) is Residual.DIAGONAL:
            return self.split(step, diagonal(step.rule.residual_diag(step.call, grad)))
        return self.split(step, known(*step.rule.signed_columns(step.call, grad, wrts)))

    def split(self, step: Step, born: Born) -> Born:
        """Columns of their own for each row, where a sample has several."""
        if step.samples_of_rows is None:
            return born
        return split_rows(born, step.samples_of_rows, step.batch_size)

    def make_room(self, step: Step, count: int) -> None:
        """If so many more columns are too many, let those on their way go ahead."""
        if step.go_round is not None and step.at_most is not None and 0 < self.under_way > step.at_most - count:
            step.go_round()
            self.under_way, self.ahead = 0, True

    def emit(self, step: Step, name: Hashable, born: Born, send: Send, bound: bool = False) -> None:
        """Send columns that begin here, in parts; if they are not `bound`, those under way may go ahead."""
        limit = born.count if step.at_most is None or bound else step.at_most
        for k, (mats, signs) in enumerate(born.chunks(max(1, min(limit, step.piece)))):
            if not bound:
                self.make_room(step, len(signs))
            send((name, id(step.record), k), mats, signs if bool((signs != 1).any()) else None)
            self.under_way += len(signs)

    def send_to_inputs(
        self, step: Step, columns: Columns | None, key: Hashable, mats: Mapping[Wrt, Tensor], signs: Tensor | None
    ) -> None:
        """Columns at the inputs of a call; parameters that calls further up use as well keep theirs in `columns`."""
        for index, source in step.sources.items():
            self.send(source, key, mats[index], signs)
        for name in step.reused if columns is not None else ():
            assert columns is not None
            columns.add_own(name, key, mats[name], signs)

    def add_curvature(self, step: Step, name: str, columns: Columns) -> None:
        """The residual of a parameter that the layer is not linear in, and that nothing further up uses."""
        if step.rule.residual(step.call, (name,)) is not Residual.ZERO:
            mats, signs = self.born(step, (name,)).all()
            columns.add_own(name, ("residual", id(step.record), name), mats[name], signs)

    def bent(self, step: Step, index: int) -> list[tuple[Hashable, Born]]:
        """The columns of the residual of the plain autograd that lies between this call's input and its producers."""
        source = step.sources[index]
        if source.stretch is None:
            return []
        share = step.rule.jac_t_mat_prod(step.full, step.grad[None], index)[0]
        if self.attribution.is_one_sample(source.consumer):
            groups = StretchResidual(source, share, merged=True).groups()
        else:
            groups = StretchResidual(source, share, self.rows_of_samples(source)).groups()
        return [(("stretch", index, k), born) for k, born in enumerate(groups)]

    def send_from_stretch(
        self, source: Source, key: Hashable, mats: Mapping[Wrt, Tensor], signs: Tensor | None
    ) -> None:
        """Columns at the beginnings of a stretch: at calls, then at parameters."""
        signs = signs if signs is None else self.rows(signs, 1)
        for n, (record, _) in enumerate(source.targets):
            self.waiting.setdefault(id(record), Columns()).add(key, self.rows(mats[n], 1), signs)
        for n, param in enumerate(source.trained, len(source.targets)):
            add_direct(self, param, source, key, self.rows(mats[n], 1), signs)

    def rows_of_samples(self, source: Source) -> list[list[Tensor]] | None:
        """By side of a stretch, the rows of every sample (`None`: rows are the samples)."""
        found = [self.attribution.rows(record) for record in (source.consumer, *[r for r, _ in source.targets])]
        if all(samples is None for samples in found):
            return None
        n = self.attribution.batch_size(source.consumer)
        each = [torch.arange(n) if samples is None else samples for samples in found]
        return [[(samples == k).nonzero()[:, 0] for k in range(n)] for samples in each]
