"""Pass over the batches of a process, and add up what they bring."""

from __future__ import annotations

from bpk.dataset.batches import Batches
from bpk.dataset.keeper import Keeper
from bpk.dataset.progress import Progress


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
