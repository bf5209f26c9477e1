"""What is kept of a backward pass in one of many processes, so that its fields can be put together with the others'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bpk.fields.parameter_state import ParameterState
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.loss import Loss
from bpk.plan.inspection import Inspection
from bpk.plan.parts import in_precision_of
from bpk.recording.context.surroundings import may_shard
from bpk.recording.record import Record

SLOT = "_bpk_local"
"""Under which name a parameter keeps it, by field."""


@dataclass
class Noted:
    """How large the batch of a pass was: its samples, and by what each loss divides (`None`: it sums), or why not."""

    samples: int = 0
    divisors: list[Tensor | float | None] = field(default_factory=list)
    problem: str = ""

    def look(self, inspection: Inspection, records: Iterable[Record]) -> None:
        """Ask the losses among these; without any, the call that was reached first says which samples there are."""
        for record in records:
            if not isinstance(record.rule, Loss):
                self.samples = self.samples or inspection.attribution.batch_size(record)
            else:
                try:
                    self.samples = inspection.attribution.batch_size(record)
                    self.divisors.append(record.rule.divides_by(record.call()))
                except UnsupportedLayer as error:
                    self.problem = str(error)

    def told(self) -> tuple[int, list[float | None], str]:
        """The same in numbers."""
        return self.samples, [None if d is None else float(d) for d in self.divisors], self.problem


@dataclass
class Local:
    """A field of one process: the pass that it is of, what adds up where that is not the field itself, and whether the
    field has become that of all processes.
    """

    noted: Noted
    parts: dict[str, Tensor] | None = None
    done: bool = False

    def adding_up(self, value: Any) -> dict[str, Any]:
        """What adds up, where the field has this value."""
        return {"": value} if self.parts is None else self.parts


def known_of(param: Tensor, field: str) -> Local | None:
    """What a parameter keeps of a field."""
    known: Local | None = vars(param).get(SLOT, {}).get(field)
    return known


def put(param: Tensor, field: str, value: Any, known: Local | None) -> None:
    """Replace a field, and what there is to know of it."""
    vars(param)[field] = in_precision_of(param, value) if isinstance(value, Tensor) else value
    slot = vars(param).setdefault(SLOT, {})
    slot.pop(field, None)
    if known is not None:
        slot[field] = known


def mark(param: Tensor, name: str, noted: Noted, state: ParameterState | None) -> None:
    """Let a parameter keep what there is to know of a field."""
    parts = None if state is None or state.parts is None else state.parts.pop(name, None)
    vars(param).setdefault(SLOT, {})[name] = Local(noted, parts)


def begin(asked: bool) -> Noted | None:
    """What a pass notes, if somebody has asked for it, if there are other processes, or may be shards."""
    group = dist.is_available() and dist.is_initialized()
    return Noted() if asked or (group and (dist.get_world_size() > 1 or may_shard())) else None
