"""Pass over the batches of a process, and add up what they bring; and say how far it is."""

from __future__ import annotations

from bpk.dataset.batches import Batches
from bpk.dataset.keeper import Keeper
from bpk.progress import Line, left, remaining


def add_up(batches: Batches, keeper: Keeper, show: bool | None) -> None:
    """Pass over the batches, from where an earlier run was."""
    totals, sink = keeper.totals, keeper.sink
    skip_passed(batches, keeper)
    progress = Progress(batches.announced, totals.batches, show)
    for number, batch in batches:
        keeper.look(batch)
        one = keeper.runner.run(number, batch)
        if sink.rules:
            sink.add(number, one.fields, one.size)
        totals.add(one.fields, one.size, one.loss)
        progress.step(one.size.samples)
        del one  # its memory is that of the next batch's gradients and fields
        keeper.added()
    totals.require_finite()
    keeper.write(done=True)
    progress.close()


def skip_passed(batches: Batches, keeper: Keeper) -> None:
    """Take the batches that an earlier run has passed, and the random numbers after them."""
    if keeper.now is not None and keeper.totals.batches:
        keeper.require_same_batches(batches.skipped(keeper.totals.batches))
        keeper.randomness.set(keeper.now)


class Progress(Line):
    """Shows batches, time left, samples and their rate.

    Args:
        total: The number of batches, if it is known.
        done: How many of them an earlier run has added up.
        show: Whether to show anything, as for `Line`.
    """

    def __init__(self, total: int | None, done: int, show: bool | None) -> None:
        super().__init__(show)
        self.total, self.before, self.done, self.samples = total, done, done, 0

    def step(self, samples: int) -> None:
        """One more batch is done."""
        self.done, self.samples = self.done + 1, self.samples + samples
        if self.is_due():
            self.show(*self.parts(self.seconds()))

    def parts(self, seconds: float) -> list[str]:
        """What there is to say, the most important first."""
        parts = [f"batch {self.done:,}" + ("" if self.total is None else f" of {self.total:,}")]
        if self.total is not None:
            parts.append(left(remaining(seconds, self.done - self.before, self.total - self.before)))
        return [*parts, f"{self.samples:,} samples", f"{self.samples / max(seconds, 1e-9):,.0f} a second"]
