"""Peak memory of one job, each in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.alternative import Alternative, Job
from benchmarks.problems import Problem
from benchmarks.quantities import QUANTITIES
from benchmarks.timing import now

ROOT = Path(__file__).resolve().parent.parent
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _kilobytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def _release() -> None:
    """Give freed memory back to the system, so that the baseline is what is in use."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return


STEPS = 10
"""How many steps a process takes that tells the first from later ones."""

PATIENCE = 5.0
"""Seconds that a step takes at most for that."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of one run, the seconds that it took, and those of the first and the tenth (if that is not long)."""

    megabytes: float
    seconds: float
    first: float = 0.0
    tenth: float | None = None


def measure(alternative: Alternative, problem: Problem, quantity: str) -> Peak:
    """Memory that forward, backward and the quantity take at their peak beyond model and data, in a fresh process.

    On Linux the peak of the resident set is reset after a first run, which pays for imports and code
    that is derived on first use. Elsewhere the peak since the start of the process is all there is.
    """
    torch.set_num_threads(1)
    job = alternative.prepare(problem.setup(), QUANTITIES[quantity])
    first = seconds_of(job)
    peak = on_accelerator(job) if problem.device != "cpu" else on_processor(job)
    tenth = None
    if first < PATIENCE:
        tenth = [seconds_of(job) for _ in range(2, STEPS)][-1]
    return Peak(*peak, first, tenth)


def seconds_of(job: Job) -> float:
    """Of one run, as a training loop would have it: fields stay."""
    start = now(job)
    job.run()
    seconds = now(job) - start
    job.clear()
    return seconds


def on_accelerator(job: Job) -> tuple[float, float]:
    """Megabytes beyond what is there, and seconds, of one run."""
    job.drop()
    torch.cuda.reset_peak_memory_stats(job.device)
    before, start = torch.cuda.memory_allocated(job.device), now(job)
    result = job.run()
    seconds = now(job) - start
    del result
    return (torch.cuda.max_memory_allocated(job.device) - before) / 2**20, seconds


def on_processor(job: Job) -> tuple[float, float]:
    """The same."""
    resettable = os.access(_CLEAR_REFS, os.W_OK)
    if resettable:
        job.drop()  # or memory for new fields is there already, and counts as that of the model
        _release()
        _CLEAR_REFS.write_text("5")
    before, start = _kilobytes("VmRSS") if resettable else _highest(), time.process_time()
    result = job.run()
    seconds = time.process_time() - start
    peak = _kilobytes("VmHWM") if resettable else _highest()
    del result
    job.clear()
    return (peak - before) / 1024, seconds


def _highest() -> float:
    """Kilobytes at the peak since the process started."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / 1024 if sys.platform == "darwin" else highest


def in_own_process(alternative: str, problem: Problem, quantity: str) -> Peak | None:
    """Run `measure` in a fresh interpreter; `None` where it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "--device", problem.device]
    command += ["--memory-of", problem.name, quantity, alternative]
    # Every tensor of some size gets pages of its own, which are returned when it is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return None
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def import_seconds(package: str = "bpk", repeats: int = 5) -> float | None:
    """Seconds that importing `package` adds to importing torch, the least of several processes.

    The first one compiles what has changed, as everywhere but where an environment forbids Python to keep it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = f"import torch, time; t = time.perf_counter(); import {package}; print(time.perf_counter() - t)"
    found = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            return None
        found.append(float(done.stdout.splitlines()[-1]))
    return min(found)
