"""How far a pass over a data set is."""

from __future__ import annotations

from bpk.progress import Line, left, remaining


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
