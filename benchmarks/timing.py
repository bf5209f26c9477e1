"""Interleaved timing: in every round each job runs once, right after the plain one it is compared with.

What is counted are the processor's seconds spent on this process. On one thread this is the time on the clock
where nothing else runs, and it does not count the time in which another process had the core. On a GPU it is the time
on the clock until all work is done.

Each job is measured in two ways: what a run has computed is kept until the next one overwrites it, as in a loop that
never deletes a field; and it is freed before, as in a loop that is done with it. First steps are measured elsewhere, in
processes of their own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.alternative import Job

SHORTEST = 0.02
"""Seconds that one measurement lasts at least; shorter jobs run several times in it."""

MOST_CALLS = 200


@dataclass
class Series:
    """Measurements of one job, each with that of the plain job just before it."""

    job: Job
    frees: bool = False
    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of one run."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median over rounds of the ratio to the plain job in the same round."""
        return statistics.median(s / p for s, p in zip(self.seconds, self.plain, strict=True))

    def measure(self) -> float:
        """Mean seconds of `calls` runs; gradients are freed after each, fields before it if it `frees` them, untimed.

        Short jobs run once more before, untimed: in a training loop, no other job has emptied the caches. Fields stay
        for the next run of the job, which may be one that keeps them.
        """
        if self.calls > 1:
            self.run_once()
        return sum(self.run_once() for _ in range(self.calls)) / self.calls

    def run_once(self) -> float:
        """Seconds of one run."""
        if self.frees:
            self.job.drop()
        start = now(self.job)
        result = self.job.run()
        seconds = now(self.job) - start
        del result
        self.job.clear()
        return seconds

    def warm_up(self) -> float:
        """Run once, and choose how many runs make a measurement."""
        once = self.measure()
        self.calls = max(1, min(MOST_CALLS, round(SHORTEST / max(once, 1e-6))))
        return once


def now(job: Job) -> float:
    """Seconds that this process has worked, or on the clock once a GPU has done its work."""
    if job.device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(job.device)
    return time.perf_counter()


def interleave(jobs: Mapping[str, Job], plain: str, rounds: int, budget: float, freed: str = "") -> dict[str, Series]:
    """Measure all jobs for `rounds` rounds, in an order that rotates from round to round.

    If there is a suffix for names of those whose results are `freed`, all but the plain one are measured in both ways.

    A job that has used up its share of `budget` seconds leaves after three rounds; one that takes more
    than its share in a single run leaves after one.
    """
    series = {name: Series(job) for name, job in jobs.items()}
    if freed:
        series |= {name + freed: Series(job, frees=True) for name, job in jobs.items() if name != plain}
    first = {name: one.warm_up() for name, one in series.items()}
    share = budget / len(series)
    order = list(series)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            start = r % len(order)
            for name in order[start:] + order[:start]:
                one = series[name]
                least = 1 if first[name] > share else 3
                if r >= least and sum(one.seconds) * one.calls > share:
                    continue
                series[plain].measure()  # so that the next run does not pay for memory that the last job gave back
                base = series[plain].measure()
                one.seconds.append(base if name == plain else one.measure())
                one.plain.append(base)
                gc.collect()
    finally:
        gc.enable()
    return series
