"""When the state of a run is written, what it holds, and how a run takes it up again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bpk.dataset.checkpoint import not_written, read, require_same, write
from bpk.dataset.randomness import Randomness
from bpk.dataset.rows import Sink
from bpk.dataset.run import Runner
from bpk.dataset.totals import Totals
from bpk.dataset.watched import Seen


class Keeper:
    """Writes a run to a file every so many batches, and puts a run back to where the file says.

    `start` has the states of the random generators before the first batch, from which a loader shuffles alike.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        every: int,
        totals: Totals,
        sink: Sink,
        runner: Runner,
        randomness: Randomness,
        fingerprint: dict[str, str],
    ) -> None:
        self.path, self.every = None if path is None else Path(path), every
        self.totals, self.sink, self.runner, self.randomness = totals, sink, runner, randomness
        self.fingerprint = fingerprint
        self.start: dict[str, Any] = {}

    def take_up(self) -> tuple[bool, dict[str, Any] | None]:
        """Whether all batches were added up, and the states of generators after those that were (`None`: none was)."""
        if self.path is None:
            self.sink.begin()
            return False, None
        if not self.path.exists():
            self.sink.begin()
            self.start = self.randomness.now()
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise not_written(self.path, error) from error
            self.write(False)  # what cannot be written is told now; and a run that is killed early shuffles alike
            return False, None
        state = read(self.path)
        require_same(self.path, state["fingerprint"], self.fingerprint)
        self.totals.restore(state["totals"])
        self.sink.restore(state["rows"], state["done"])
        self.runner.first = None if state["first"] is None else Seen(*state["first"])
        self.start = state["start"]
        self.randomness.set(state["now"] if state["done"] else self.start)
        return state["done"], state["now"]

    def added(self) -> None:
        """One more batch was added up."""
        if self.path is not None and self.totals.batches % self.every == 0:
            self.write(False)

    def write(self, done: bool) -> None:
        """Write all that a run needs to go on."""
        if self.path is None:
            return
        self.totals.require_finite()
        first = self.runner.first
        state = {
            "fingerprint": self.fingerprint,
            "totals": self.totals.state(),
            "rows": self.sink.state(),
            "first": None if first is None else (first.samples, first.divisors, first.factors),
            "start": self.start,
            "now": self.randomness.now(),
            "done": done,
        }
        write(self.path, state)
