"""What lies behind a loss, as the modules here look at it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bpk.plan.sources import Sources
from bpk.recording.record import Record


@dataclass(eq=False)
class Behind:
    """A root (a loss, or the last call where none is extended), the calls `above` it, and who feeds whom.

    `followed` is what was found last to follow from the form, with batch axes as they are: of `n` samples and rows of
    the root.
    """

    root: Record
    sources: Sources
    above: list[Record]
    followed: tuple[int, Tensor, dict[Record, Tensor]] | None = field(default=None, init=False)

    @property
    def records(self) -> tuple[Record, ...]:
        """All of them, the root last."""
        return (*self.above, self.root)

    @property
    def calls(self) -> list[Record]:
        """Those that may have been given data: those behind a loss; the last call, too, if no loss is extended."""
        return self.above if self.root.is_loss else [*self.above, self.root]

    def put_back(self) -> None:
        """Take all batch axes for those in front: a hypothesis that does not hold has moved some."""
        for record in self.above:
            record.shift(0)
        self.followed = None

    def has_followed(self, n: int, rows: Tensor) -> dict[Record, Tensor] | None:
        """The sample of each row of all calls, if these are what was followed last."""
        if self.followed is None or self.followed[0] != n or not torch.equal(self.followed[1], rows):
            return None
        return self.followed[2]
