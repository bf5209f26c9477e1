"""How far a run is, in one line."""

from __future__ import annotations

import shutil
import sys
import time
from datetime import timedelta


class Progress:
    """Shows batches, time left, samples and their rate.

    Args:
        total: The number of batches, if it is known.
        done: How many of them an earlier run has added up.
        show: Whether to show anything (`None`: only on a terminal). Elsewhere there is a new line every ten seconds.
    """

    def __init__(self, total: int | None, done: int, show: bool | None) -> None:
        self.total, self.before, self.done, self.samples = total, done, done, 0
        self.terminal = sys.stderr.isatty()
        self.shown = self.terminal if show is None else show
        self.start = self.last = time.monotonic()

    def step(self, samples: int) -> None:
        """One more batch is done."""
        self.done, self.samples = self.done + 1, self.samples + samples
        now = time.monotonic()
        if self.shown and now - self.last > (0.1 if self.terminal else 10):
            self.last = now
            self.write(self.line(now - self.start, shutil.get_terminal_size().columns - 1))

    def line(self, seconds: float, width: int) -> str:
        """What there is to say, the most important first, as far as it fits."""
        parts = [f"batch {self.done:,}" + ("" if self.total is None else f" of {self.total:,}")]
        if self.total is not None:
            left = seconds / max(1, self.done - self.before) * max(0, self.total - self.done)
            parts.append(f"{timedelta(seconds=round(left))} left")
        parts += [f"{self.samples:,} samples", f"{self.samples / max(seconds, 1e-9):,.0f} a second"]
        text = parts[0]
        for part in parts[1:]:
            text = f"{text}, {part}" if len(text) + len(part) + 2 <= width else text
        return text[: max(0, width)]

    def write(self, text: str) -> None:
        """Put a text in the place of the line, or on a new one."""
        print(
            f"\r\033[K{text}" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def close(self) -> None:
        """Clear the line."""
        if self.shown and self.terminal:
            self.write("")
