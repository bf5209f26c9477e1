"""How many columns of a square root may exist at a time."""

from __future__ import annotations

from bpk.jacobians.core.errors import explain, warn
from bpk.plan.plan import Plan

MEMORY = 1 << 28
"""Bytes that columns of a square root may take at the largest layer on a processor, unless the user says more."""

MANY = 64
"""So many columns fill a processor: where half of the memory holds them, the other half would not save any time."""

LIVE = 3
"""How many times the columns exist: those that arrive at a layer, those that it sends, and what it needs for both."""


def columns_at_a_time(plan: Plan, chunk_size: int | None, memory: int | None, growth: float = 1.0) -> int | None:
    """How many columns may exist at the same time (`None`: all of them).

    Args:
        plan: The calls that they pass.
        chunk_size: What the user says about it.
        memory: What the user says about the bytes that they may take.
        growth: How much larger than the plan's the batch is that is asked about.
    """
    if chunk_size is not None:
        return chunk_size
    output = plan.steps[0].call.inputs[0]
    column = LIVE * round(growth * plan.largest) * output.element_size()
    if memory is None:
        if output.device.type != "cpu":
            return None
        half = MEMORY // 2 // column
        return half if half >= MANY else max(1, MEMORY // column)
    if column > memory:
        warn(too_small(memory, column))
    return max(1, memory // column)


def too_small(memory: int, column: int) -> str:
    """What the user hears where a limit cannot be kept."""
    return explain(
        f"backpack(memory={memory}) is less than one column takes at the largest layer: {column} bytes.",
        "columns have entries for all samples of the batch; they go one at a time now.",
        "use a smaller batch, or a larger limit.",
    )
