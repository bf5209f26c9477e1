"""A progress bar, if a package that draws one is installed; a line of text otherwise."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class Progress:
    """Counts steps out of `total` and shows them on the terminal (`None`: only if there is one)."""

    def __init__(self, total: int, show: bool | None) -> None:
        self.total, self.done, self.text = total, 0, ""
        self.shown = sys.stderr.isatty() if show is None else show
        self.bar: Any = None
        if self.shown and find_spec("tqdm") is not None:
            self.bar = import_module("tqdm").tqdm(total=total, leave=False)

    def step(self, text: str) -> None:
        """One more step begins: `text`."""
        self.done, self.text = self.done + 1, text
        if self.bar is not None:
            self.bar.set_description_str(text)
            self.bar.update()
        elif self.shown:
            print(f"\r[{self.done}/{self.total}] {text:<90.90}", end="", file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """What is going on within the step."""
        shown = f"{self.text}, {text}"
        if self.bar is not None:
            self.bar.set_description_str(shown)
        elif self.shown:
            print(f"\r[{self.done}/{self.total}] {shown:<90.90}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)
