"""Columns that travel from call to call: how they are sent, added up where branches meet, and handed to extensions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from bpk.jacobians.losses.joint import Joint
from bpk.plan.graph import Source
from bpk.recording.record import Record
from bpk.sweeps.sweeps import Columns, Step, Sweep, collect_rows, matched


class ColumnSweep(Sweep):
    """Columns `[V, N, *out]` that go from call to call by the transposed Jacobians: `U <- J^T U`.

    Where they come from is up to those that inherit.
    """

    def visit(self, step: Step) -> Columns:
        columns: Columns = self.arrived(step)
        for key, mat in columns.blocks.items():
            mat = columns.blocks[key] = matched(mat, step.full)
            alone = len(step.sources) == 1
            free = alone and key in columns.unshared and not step.record.params
            if free and mat.is_contiguous():
                mat = mat.view(-1).view(mat.shape)  # the strides of axes with one entry may be any
            for index, source in step.sources.items():
                step.call.spare = mat.view(-1) if free and mat.is_contiguous() else None
                sent = step.rule.jac_t_mat_prod(step.call, mat, index)
                step.call.spare = None
                self.send(source, key, sent, columns.signs[key])
                if free or (alone and sent.untyped_storage().data_ptr() != mat.untyped_storage().data_ptr()):
                    self.unshare(source, key)
        return columns

    def send_joint(self, step: Step, joint: Joint, key: Hashable, mat: Tensor, signs: Tensor | None) -> None:
        """Hand columns of the predictions of a loss, side by side, to the calls that produced them."""
        for index, part in joint.split(mat).items():
            self.send(step.sources[index], key, part, signs)

    def unshare(self, source: Source, key: Hashable) -> None:
        """Note that what was just sent is in memory of its own, which the next layer may overwrite."""
        if source.stretch is None and len(source.targets) == 1:
            self.waiting[id(source.targets[0][0])].unshared.add(key)

    def send(self, source: Source, key: Hashable, mat: Tensor, signs: Tensor | None) -> None:
        """Hand columns to the calls that produced an input."""
        if source.stretch is not None and self.samples is not None:
            mat = self.widen(mat, source)
        collect_rows(self, source, key, mat, signs)
        for record, part in source.pull(mat):
            if source.stretch is not None:
                part = self.rows(part, 1)
            self.waiting.setdefault(id(record), Columns()).add(key, part, signs)

    def relay(self, record: Record, before: Sequence[int]) -> None:
        columns = self.waiting.get(id(record), Columns())
        for key, mat in columns.blocks.items():
            columns.blocks[key] = record.relaid(mat, before)

    def hand_over(self, record: Record) -> Tensor:
        columns: Columns = self.waiting[id(record)]
        return torch.cat(list(columns.blocks.values()))

    def take_back(self, record: Record, sources: dict[int, Source], sent: Tensor | Sequence[Tensor]) -> None:
        columns: Columns = self.waiting.pop(id(record))
        sizes = [len(mat) for mat in columns.blocks.values()]
        mats = [sent] if isinstance(sent, Tensor) else list(sent)
        for index, source in sources.items():
            for key, mat in zip(columns.blocks, mats[index].split(sizes), strict=True):
                self.send(source, key, mat, columns.signs[key])

    def widen(self, mat: Tensor, source: Source) -> Tensor:
        """Columns over the whole batch again, zero for the samples that are left out."""
        assert self.samples is not None
        n = source.consumer.batch_size
        full = mat.new_zeros(mat.shape[0], n, *mat.shape[2:])
        return full.index_copy(1, torch.as_tensor(self.samples, device=mat.device), mat)
