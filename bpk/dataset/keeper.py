"""When the state of a run is written, what it holds, and how a run takes it up again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bpk.dataset.batches import rows_of
from bpk.dataset.checkpoint import not_written, read, require_same, write
from bpk.dataset.fingerprint import digest
from bpk.dataset.randomness import Randomness
from bpk.dataset.rows import Sink
from bpk.dataset.run import Runner
from bpk.dataset.totals import Totals
from bpk.dataset.watched import Seen
from bpk.jacobians.core.errors import explain, value_error


class Keeper:
    """Writes a run to a file every so many batches, and puts a run back to where the file says.

    `start` has the states of the random generators before the first batch, from which a loader shuffles alike. Of an
    earlier run, `now` has those after the last batch that it added up, and `done` says whether that was all. `given`
    has what the first batch was, and how many rows all of them had.
    """

    def __init__(
        self,
        path: Path | None,
        every: int,
        totals: Totals,
        sink: Sink,
        runner: Runner,
        randomness: Randomness,
        fingerprint: dict[str, str],
    ) -> None:
        self.path, self.every = path, every
        self.totals, self.sink, self.runner, self.randomness = totals, sink, runner, randomness
        self.fingerprint = fingerprint
        self.start: dict[str, Any] = {}
        self.now: dict[str, Any] | None = None
        self.done = False
        self.given = "", 0

    def take_up(self) -> None:
        """Go on from where an earlier run was, or begin."""
        if self.path is None or not self.path.exists():
            self.begin()
        else:
            self.restore(self.path, read(self.path))

    def begin(self) -> None:
        """No batch was added up before."""
        self.sink.begin()
        if self.path is not None:
            self.start = self.randomness.now()
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise not_written(self.path, error) from error
            self.write(False)  # what cannot be written is told now; and a run that is killed early shuffles alike

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """Take up what is in the file."""
        require_same(path, state["fingerprint"], self.identity())
        self.totals.restore(state["totals"])
        self.sink.restore(state["rows"], state["done"])
        self.runner.first = None if state["first"] is None else Seen(*state["first"])
        self.start, self.now, self.done = state["start"], state["now"], state["done"]
        self.given = state["given"]
        self.randomness.set(state["now"] if self.done else self.start)

    def identity(self) -> dict[str, str]:
        """What must be the same where a run goes on."""
        return self.fingerprint

    def look(self, batch: Any) -> None:
        """Note what the loader gives, before a step changes it."""
        if self.path is not None:
            first, rows = self.given
            self.given = first or digest(batch), rows + (rows_of(batch) or 0)

    def require_same_batches(self, passed: Iterable[Any]) -> None:
        """Refuse a loader that gives other batches than those that an earlier run has added up, as far as one can tell.

        The first one is loaded from the same states of random generators. Later ones may be augmented by others.
        """
        (first, rows), self.given = self.given, ("", 0)
        for batch in passed:
            self.look(batch)
        why = "sums are those of the batches before; samples are missing, or count twice, if the loader gives others."
        do = "let it give the same batches in the same order, or delete the file to begin anew."
        if rows != self.given[1]:
            what = f"its batches up to here had {rows} rows, and now they have {self.given[1]}."
            raise value_error(f"The checkpoint '{self.path}' belongs to another run: {what}", why, do)
        if first != self.given[0]:
            what = f"The first batch is another one than that of the run that wrote the checkpoint '{self.path}'."
            do += " Nothing is needed if only an augmentation differs, by random numbers of its own."
            warnings.warn(explain(what, why, do), UserWarning, stacklevel=2)

    def added(self) -> None:
        """One more batch was added up."""
        if self.path is not None and self.totals.batches % self.every == 0:
            self.write(False)

    def write(self, done: bool) -> None:
        """Write all that a run needs to go on."""
        if self.path is not None:
            write(self.path, self.state(done))

    def state(self, done: bool) -> dict[str, Any]:
        """All that a run needs to go on."""
        self.totals.require_finite()
        first = self.runner.first
        return {
            "fingerprint": self.identity(),
            "totals": self.totals.state(),
            "rows": self.sink.state(),
            "first": None if first is None else (first.samples, first.divisors, first.factors),
            "given": self.given,
            "start": self.start,
            "now": self.randomness.now(),
            "done": done,
        }
