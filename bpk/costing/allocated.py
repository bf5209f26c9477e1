"""How much memory tensors took at the peak of some code, and how much of it they still take.

On processors torch tells it to its profiler only. The older of its two is used, which has no public name by itself: the
newer one says hello on the terminal, and takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import profiler_legacy

ENTRIES = ("torch.autograd.profiler_legacy.profile._start_trace", "torch.autograd._disable_profiler_legacy")
"""What this file uses of torch without a public name. If it goes: `torch.profiler.profile(profile_memory=True)`."""


def allocated(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes at the peak and afterwards, beyond what was there before `work()`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    profiler_legacy.profile(profile_memory=True)._start_trace()
    try:
        work()
    finally:
        threads = torch.autograd._disable_profiler_legacy()
    now = peak = 0
    for event in (event for events in threads for event in events if event.kind() == "memory_alloc"):
        now += event.cpu_memory_usage()
        peak = max(peak, now)
    return peak, now
