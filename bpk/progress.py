"""How far a long run is: a line that is written anew on terminals and in notebooks; elsewhere one now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")
FALLBACK = 80
"""Columns of a place that does not say how many it has: notebooks, and terminals that claim to have none."""


class Line:
    """A line for people who wait, on standard error.

    Args:
        show: Whether to show anything (`None`: only on terminals and in notebooks). Where lines cannot be written anew,
            there is a new one every ten seconds.
    """

    def __init__(self, show: bool | None = None) -> None:
        self.terminal = sys.stderr.isatty()
        self.renewed = self.terminal or "ipykernel" in sys.modules
        self.shown = self.renewed if show is None else show
        self.start = self.last = time.monotonic()
        self.length = 0

    def show(self, *parts: str) -> None:
        """Say what there is to say, the most important first, as far as it fits."""
        if self.is_due():
            self.last = time.monotonic()
            self.write(fitting(parts, self.columns() - 1))

    def is_due(self) -> bool:
        """Whether something would be shown now."""
        return self.shown and time.monotonic() - self.last > (0.1 if self.renewed else 10)

    def columns(self) -> int:
        """The width of the place where the line goes, which need not be that of standard output."""
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or FALLBACK if self.terminal else FALLBACK
        except (OSError, ValueError):  # no file stands behind it
            return FALLBACK

    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.start

    def write(self, text: str) -> None:
        """Put a text in the place of the line, or on a new one."""
        if self.renewed:
            print(f"\r{text:<{self.length}}", end="", file=sys.stderr, flush=True)
            self.length = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self.length:
            self.write("")
            print("\r", end="", file=sys.stderr, flush=True)


def fitting(parts: Collection[str], width: int) -> str:
    """As many parts as fit, the first one at any rate, cut where it must be.

    >>> fitting(["batch 7 of 12", "0:00:03 left", "448 samples"], 30), fitting(["batch 7 of 12"], 5)
    ('batch 7 of 12, 0:00:03 left', 'batch')
    """
    text, *others = parts
    for part in others:
        text = f"{text}, {part}" if len(text) + len(part) + 2 <= width else text
    return text[: max(0, width)]


def left(seconds: float) -> str:
    """A time for people.

    >>> left(40.2)
    '0:00:40 left'
    """
    return f"{timedelta(seconds=round(max(0.0, seconds)))} left"


def remaining(seconds: float, done: int, total: int) -> float:
    """The seconds that the rest will take if it goes on as it went.

    >>> remaining(10.0, 20, 100)
    40.0
    """
    return seconds / max(1, done) * max(0, total - done)


def sofar(what: str, done: int, total: int, seconds: float) -> list[str]:
    """What is begun, of how many, and the time left once one is done.

    >>> sofar("rule", 0, 4, 0.0), sofar("rule", 2, 4, 6.0)
    (['rule 1 of 4'], ['rule 3 of 4', '0:00:06 left'])
    """
    return [f"{what} {done + 1:,} of {total:,}", *[left(remaining(seconds, done, total))] * bool(done)]


def followed(what: str, items: Collection[T], show: bool | None = None) -> Iterator[T]:
    """The items, while a line says how many of them are done, and the time left.

    >>> [epoch for epoch in followed("epoch", range(3))]
    [0, 1, 2]
    """
    line = Line(show)
    try:
        for done, item in enumerate(items):
            line.show(*sofar(what, done, len(items), line.seconds()))
            yield item
    finally:
        line.close()
