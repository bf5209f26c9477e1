"""What is going on, in one line of the terminal."""

from __future__ import annotations

import sys


class Progress:
    """Counts steps out of `total` and shows them on the terminal (`None`: only if there is one)."""

    def __init__(self, total: int, show: bool | None) -> None:
        self.total, self.done, self.text = total, 0, ""
        self.shown = sys.stderr.isatty() if show is None else show

    def step(self, text: str) -> None:
        """One more step begins: `text`."""
        self.done, self.text = self.done + 1, text
        self.write(f"[{self.done}/{self.total}] {text}")

    def detail(self, text: str) -> None:
        """What is going on within the step."""
        self.write(f"[{self.done}/{self.total}] {self.text}, {text}")

    def close(self) -> None:
        """Clear the line."""
        self.write(f"{'':99}\r")

    def write(self, text: str) -> None:
        """Put a text in the place of the line."""
        if self.shown:
            print(f"\r{text:<100.100}", end="", file=sys.stderr, flush=True)
