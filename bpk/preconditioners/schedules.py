"""Numbers that may change from step to step, and intervals between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan, nan
from numbers import Real
from typing import Any

from bpk.jacobians.core.errors import value_error

Schedule = float | Callable[[int], float]
"""A number, or a function of the step (counted from 0)."""


def steps_of(interval: Any) -> int:
    """An interval in whole steps."""
    if not isinstance(interval, Real) or not 1 <= float(interval) < inf:
        raise value_error(
            f"An interval of {interval!r} steps is not possible.",
            "something happens in every so manieth step.",
            "pass a whole number of at least 1, or a function of the step that returns one.",
        )
    return int(float(interval))


def weight_of_past(decay: Any) -> float:
    """The weight that running means have beside what is new."""
    if isinstance(decay, str) or decay is None or not 0 <= decay <= 1:
        raise value_error(
            f"decay={decay!r} is no weight of the past.",
            "running means are d m + (1 - d) new, with weights from 0 to 1.",
            "pass a number between 0 and 1, such as decay=0.95 (or a function of the step that returns one).",
        )
    return decay


def rate_of(lr: Any) -> float:
    """The learning rate; not a number would be no limit for any step."""
    try:
        rate = float(lr)
    except (TypeError, ValueError):
        rate = nan
    if isnan(rate):
        raise value_error(
            f"lr={lr!r} is no learning rate.",
            "kl_clip= limits the step that the optimizer makes, which it scales.",
            "pass lr=0.1, or lr=lambda step: optimizer.param_groups[0]['lr'].",
        )
    return rate


def constant(schedule: Schedule, check: Callable[[Any], float]) -> Schedule:
    """A schedule, of which a number is checked before any step."""
    if not callable(schedule):
        check(schedule)
    return schedule


def require_limit(kl_clip: Any, lr: Schedule | None) -> None:
    """Refuse what no step can be shortened to."""
    if lr is not None:
        constant(lr, rate_of)
    else:
        raise value_error(
            "kl_clip= needs lr=.",
            "it limits the step that the optimizer makes, which the learning rate scales.",
            "pass lr=0.1, or lr=lambda step: optimizer.param_groups[0]['lr'].",
        )
    if isinstance(kl_clip, str) or not kl_clip > 0:
        raise value_error(
            f"kl_clip={kl_clip!r} is no limit.",
            "steps are shortened until they are within it.",
            "pass a positive number, such as kl_clip=1e-3, or None for steps of any length.",
        )


def both(intervals: Any) -> tuple[Schedule, Schedule]:
    """The two intervals of a preconditioner that decomposes what it has looked at."""
    if not isinstance(intervals, Sequence) or isinstance(intervals, str) or len(intervals) != 2:
        raise value_error(
            f"intervals={intervals!r} are not two.",
            "looking at curvature and preparing inverses cost differently, and happen in steps of their own.",
            "pass two numbers, or functions of the step, such as intervals=(1, 10).",
        )
    return constant(intervals[0], steps_of), constant(intervals[1], steps_of)
