"""What travels for an extension that works through hand-written module extensions only: whatever these return."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import Source
from bpk.recording.record import Record
from bpk.sweeps.sweeps import Step, Sweep


class ByHand(Sweep):
    """A quantity that module extensions hand from layer to layer; nothing but its shares of branches is known.

    What is one tensor `[V, N, *x]` also passes plain autograd between two layers.
    """

    @property
    def key(self) -> Hashable:
        return ("by hand", self.samples)

    def start(self, step: Step, loss: Loss) -> None:
        raise self.no_module_extension(step.record)

    def visit(self, step: Step) -> Any:
        raise self.no_module_extension(step.record)

    def hand_over(self, record: Record) -> Any:
        return None if isinstance(record.rule, Loss) else self.waiting.pop(id(record), None)

    def take_back(self, record: Record, sources: dict[int, Source], sent: Any) -> None:
        for index, source in sources.items():
            share = sent[index] if isinstance(sent, (list, tuple)) else sent
            if share is None:
                continue
            same = source.stretch is None and source.exits[0] == source.entrance
            if source.trained or not (same or isinstance(share, Tensor)):
                raise self.no_way(source)
            for target, part in [(source.targets[0][0], share)] if same else self.pulled(source, share):
                known = self.waiting.get(id(target))
                self.waiting[id(target)] = part if known is None else known + part

    def pulled(self, source: Source, mat: Tensor) -> list[tuple[Record, Tensor]]:
        """Columns of the samples considered, through plain autograd."""
        if self.samples is None:
            return source.pull(mat)
        index = torch.as_tensor(self.samples, device=mat.device)
        full = mat.new_zeros(mat.shape[0], source.consumer.batch_size, *mat.shape[2:]).index_copy(1, index, mat)
        return [(target, self.rows(part, 1)) for target, part in source.pull(full)]

    def no_way(self, source: Source) -> UnsupportedLayer:
        """The refusal where functions lie between two layers."""
        return UnsupportedLayer(
            explain(
                f"A quantity of module extensions cannot pass what lies before '{source.consumer.path}' "
                f"({type(source.consumer.module).__name__}).",
                "plain functions with parameters are there, or the quantity is more than one tensor.",
                "write modules in place of the functions, with module extensions.",
            )
        )
