"""The sweep of the Hessian's diagonal: signed columns, with those of every residual on the way."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from bpk.attribution import to_samples
from bpk.graph import Source
from bpk.jacobians.call import Wrt
from bpk.jacobians.loss import Loss
from bpk.jacobians.rule import Residual
from bpk.parameters import is_trained
from bpk.records import Record
from bpk.residual import StretchResidual
from bpk.sweeps import Columns, SquareRoot, Step, add_direct, apart


class SignedHessian(SquareRoot):
    """Signed columns `U`, `s` with `H = sum_k s_k U_k U_k^T`: the Hessian of the loss at each output.

    The loss contributes its own columns, each nonlinear layer those of its residual (the second derivative
    contracted with the gradient); from there they travel like the square root of the GGN.
    """

    def __init__(self, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(None, samples)

    @property
    def key(self) -> Hashable:
        return ("hessian", self.samples)

    def rounds(self, step: Step, loss: Loss, columns: int | None) -> Iterator[None]:
        """One round: layers add columns of their own."""
        self.start(step, loss)
        return iter(())

    def hand_over(self, record: Record) -> Tensor:
        raise self.no_module_extension(record)

    def start(self, step: Step, loss: Loss) -> None:
        self.bend(step, 0, step.sources[0])
        root, signs = loss.hessian_columns(step.full)
        if step.samples_of_rows is not None:
            split, signs = split_rows({0: root}, signs, step.samples_of_rows, step.batch_size)
            root = split[0]
        mats = step.pieces(self.rows(root, 1) * step.grad.abs().sqrt())
        signed = self.rows(signs, 1) * step.grad.sign()
        parts = signed.split(len(mats[0])) if bool((signed != 1).any()) else [None] * len(mats)
        for k, (mat, part) in enumerate(zip(mats, parts, strict=True)):
            self.send(step.sources[0], ("loss", id(step.record), k), mat, part)

    def visit(self, step: Step) -> Columns:
        columns = super().visit(step)
        for index, source in step.sources.items():
            self.bend(step, index, source)
        for name, param in step.record.params.items():
            if is_trained(param) and name not in step.reused:
                self.add_curvature(step, name, columns)
        wrts: tuple[Wrt, ...] = tuple(step.sources)
        joint = wrts + step.reused
        if not joint or step.rule.residual(step.call, joint) is Residual.ZERO:
            return columns
        born, signs = step.rule.residual_columns(step.call, self.rows(step.grad), joint)
        if step.samples_of_rows is not None:
            born, signs = split_rows(born, signs, step.samples_of_rows, step.batch_size)
        pieces = {wrt: step.pieces(mat) for wrt, mat in born.items()}
        size = len(next(iter(pieces.values()))[0])
        for k, part in enumerate(signs.split(size)):
            key = ("residual", id(step.record), k)
            for index, source in step.sources.items():
                self.send(source, key, pieces[index][k], part)
            for name in step.reused:
                own = pieces[name][k]
                if step.samples_of_rows is not None:
                    own = to_samples(own, step.samples_of_rows, step.batch_size)
                columns.add_own(name, key, own, part)
        return columns

    def add_curvature(self, step: Step, name: str, columns: Columns) -> None:
        """The residual of a parameter that the layer is not linear in, and that nothing further up uses."""
        if step.rule.residual(step.call, (name,)) is Residual.ZERO:
            return
        born, signs = step.rule.residual_columns(step.call, self.rows(step.grad), (name,))
        own = born[name]
        if step.samples_of_rows is not None:
            born, signs = split_rows(born, signs, step.samples_of_rows, step.batch_size)
            own = to_samples(born[name], step.samples_of_rows, step.batch_size)
        columns.add_own(name, ("residual", id(step.record), name), own, signs)

    def bend(self, step: Step, index: int, source: Source) -> None:
        """Add the residual of the plain autograd that lies between this call's input and its producers."""
        if source.stretch is None:
            return
        share = step.rule.jac_t_mat_prod(step.full, step.grad[None], index)[0]
        residual = StretchResidual(source, share, self.rows_of_samples(source))
        for k, (parts, signs) in enumerate(residual.groups()):
            key = ("stretch", id(step.record), index, k)
            born, signed = [self.rows(part, 1) for part in parts], self.rows(signs, 1)
            for (record, _), part in zip(source.targets, born, strict=False):
                self.waiting.setdefault(id(record), Columns()).add(key, part, signed)
            for param, part in zip(source.trained, born[len(source.targets) :], strict=True):
                add_direct(self, param, source, key, part, signed)

    def rows_of_samples(self, source: Source) -> list[list[Tensor]] | None:
        """By side of a stretch, the rows of every sample (`None`: rows are the samples)."""
        found = [self.attribution.rows(record) for record in (source.consumer, *[r for r, _ in source.targets])]
        if all(samples is None for samples in found):
            return None
        n = self.attribution.batch_size(source.consumer)
        each = [torch.arange(n) if samples is None else samples for samples in found]
        return [[(samples == k).nonzero()[:, 0] for k in range(n)] for samples in each]


def split_rows(columns: dict[Wrt, Tensor], signs: Tensor, samples: Tensor, n: int) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Columns of their own for each row of a sample: `[K, R, ...]` to `[K S, R, ...]`, signs `[K, R]` to `[K S, N]`."""
    return {wrt: apart(mat, samples) for wrt, mat in columns.items()}, to_samples(apart(signs, samples), samples, n)
