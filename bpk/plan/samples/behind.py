"""What lies behind a loss, as the modules here look at it."""

from __future__ import annotations

from dataclasses import dataclass

from bpk.plan.sources import Sources
from bpk.recording.record import Record


@dataclass(eq=False)
class Behind:
    """A root (a loss, or the last call where none is extended), the calls `above` it, and who feeds whom."""

    root: Record
    sources: Sources
    above: list[Record]

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
