"""When the state of a run is written, what it holds, and how a run takes it up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bpk.dataset.checkpoint import not_written, read, require_same, write
from bpk.dataset.fingerprint import digest
from bpk.dataset.randomness import Randomness
from bpk.dataset.rows import Sink
from bpk.dataset.run import Runner
from bpk.dataset.totals import Totals
from bpk.dataset.watched import Seen
from bpk.jacobians.core.errors import explain


class Keeper:
    """Writes a run to a file every so many batches, and puts a run back to where the file says.

    `start` has the states of the random generators before the first batch, from which a loader shuffles alike. Of an
    earlier run, `now` has those after the last batch that it added up, and `done` says whether that was all. `last` is
    how many batches there were when one was looked at, and what that one was.
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
        self.last = 0, ""

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
        self.last = state["last"]
        self.randomness.set(state["now"] if self.done else self.start)

    def identity(self) -> dict[str, str]:
        """What must be the same where a run goes on."""
        return self.fingerprint

    @property
    def passed(self) -> int:
        """What `every` counts."""
        return self.totals.batches

    def due(self, passed: int) -> bool:
        """Whether the state is written when so much has passed."""
        return self.path is not None and passed % self.every == 0

    def look(self, batch: Any) -> None:
        """Note what a batch is, before anything changes it, if the state is written once it has been added up."""
        if self.due(self.passed + 1):
            self.last = self.totals.batches + 1, digest(batch)

    def require_same_batch(self, number: int, known: str, batch: Any) -> None:
        """Refuse a loader that gives other batches than those that an earlier run has added up."""
        if known and digest(batch) != known:
            raise ValueError(
                explain(
                    f"The checkpoint '{self.path}' belongs to another run: batch {number} of the loader differs.",
                    "what has been added up is that of the batches before; samples would be missing, or count twice.",
                    "let the loader give the same batches in the same order (random numbers of data sets and samplers "
                    "from the global generators of Python, NumPy or torch), or delete the file to begin anew.",
                )
            )

    def added(self) -> None:
        """One more batch was added up."""
        if self.due(self.passed):
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
            "last": self.last,
            "start": self.start,
            "now": self.randomness.now(),
            "done": done,
        }
