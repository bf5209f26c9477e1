"""Interleaved timing: in every round each job runs once, in an order that rotates from round to round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.alternative import Job

SHORTEST = 0.02
"""Seconds that one measurement lasts at least; shorter jobs run several times in it."""


@dataclass
class Series:
    """Measurements of one job."""

    job: Job
    calls: int = 1
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    @property
    def total(self) -> float:
        return sum(self.seconds.values()) * self.calls

    def measure(self) -> float:
        """Mean seconds of `calls` runs; what they leave behind is freed between them, untimed."""
        total = 0.0
        for _ in range(self.calls):
            start = time.perf_counter()
            result = self.job.run()
            total += time.perf_counter() - start
            del result
            self.job.clear()
        return total / self.calls


def interleave(
    jobs: Mapping[str, Job],
    rounds: int,
    budget: float,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Series]:
    """Measure all jobs for `rounds` rounds; a job that has used up its share of `budget` seconds leaves.

    A job too slow for three rounds within its share keeps fewer measurements, but at least one.
    """
    series = {name: Series(job) for name, job in jobs.items()}
    for one in series.values():  # warm up, and see how long a run takes
        once = one.measure()
        one.calls = max(1, min(200, round(SHORTEST / max(once, 1e-6))))
        if once > budget / 2:
            one.seconds[-1] = once
    share = budget / max(1, len(series))
    order = list(series)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            for name in order[r % len(order) :] + order[: r % len(order)]:
                one = series[name]
                spent = one.total
                if -1 in one.seconds or (len(one.seconds) >= 3 and spent > share and name != "plain"):
                    continue
                one.seconds[r] = one.measure()
            gc.collect()
            if on_round is not None:
                on_round(r)
    finally:
        gc.enable()
    return series


def ratio(one: Series, plain: Series) -> float:
    """Median over median, of the rounds in which both took part."""
    common = sorted(set(one.seconds) & set(plain.seconds))
    if not common:
        return one.median / plain.median
    return statistics.median(one.seconds[r] for r in common) / statistics.median(plain.seconds[r] for r in common)
