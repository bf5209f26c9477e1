"""Numbers that may change from step to step, and intervals between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bpk.jacobians.core.errors import explain

Schedule = float | Callable[[int], float]
"""A number, or a function of the step (counted from 0)."""


def steps_of(interval: float) -> int:
    """An interval in whole steps."""
    every = int(interval)
    if every < 1:
        raise ValueError(
            explain(f"An interval of {every} steps is not possible.", "it is at least 1.", "see `intervals`.")
        )
    return every


def both(intervals: Any) -> tuple[Schedule, Schedule]:
    """The two intervals of a preconditioner that decomposes what it has looked at."""
    if not isinstance(intervals, Sequence) or len(intervals) != 2:
        raise ValueError(
            explain(
                f"intervals={intervals!r} are not two.",
                "looking at curvature and preparing inverses cost differently, and happen in steps of their own.",
                "pass two numbers, or functions of the step, such as intervals=(1, 10).",
            )
        )
    return intervals[0], intervals[1]
