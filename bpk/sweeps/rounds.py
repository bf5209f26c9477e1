"""Columns of a square root in several rounds: some go all the way back before others start, so that few exist at once.

A round does not wait for autograd: it visits the calls behind a loss while autograd is at the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bpk.fields.parameters import is_trained
from bpk.fields.statistics import Use
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import explain, warn
from bpk.plan.graph import connected, consumers_first
from bpk.recording.record import Record
from bpk.sweeps.sweeps import Step, Sweep

if TYPE_CHECKING:
    from bpk.backward import Backward

MEMORY = 1 << 28
"""Bytes that columns of a square root may take at the largest layer on a processor, unless the user says more."""

LIVE = 3
"""How many times the columns exist: those that arrive at a layer, those that it sends, and what it needs for both."""


def columns_at_a_time(backward: Backward, key: Hashable, step: Step) -> int | None:
    """How many columns may exist at the same time (`None`: all of them)."""
    if key not in backward.combining or torch.is_grad_enabled():
        return None
    if backward.context.chunk_size is not None:
        return backward.context.chunk_size
    on_processor = step.full.output.device.type == "cpu"
    memory, column = backward.context.memory, LIVE * backward.largest * step.full.output.element_size()
    if memory is None:
        return max(1, MEMORY // column) if on_processor else None
    if column > memory and not backward.too_small:
        backward.too_small = True
        warn(too_small(memory, column))
    return max(1, memory // column)


def too_small(memory: int, column: int) -> str:
    """What the user hears where a limit cannot be kept."""
    return explain(
        f"backpack(memory={memory}) is less than one column takes at the largest layer: {column} bytes.",
        "columns have entries for all samples of the batch; they go one at a time now.",
        "use a smaller batch, or a larger limit.",
    )


def go_round(backward: Backward, key: Hashable, sweep: Sweep, root: Record) -> None:
    """Send what waits behind a loss all the way back, and keep what extensions make of it."""
    above = backward.above[root]
    sources = {id(record): backward.feeding(record) for record in (*above, root)}
    nodes = {id(r): edge[0] for found in sources.values() for s in found.values() for r, edge in s.targets}
    open_uses = Counter(id(p) for record in above for p in record.params.values())
    for record in consumers_first(root, above, sources):
        open_uses.subtract(id(p) for p in record.params.values())
        node = nodes[id(record)]
        if id(record) not in sweep.waiting or record.rule is None or node is None:
            continue
        if record.released:  # autograd has passed by without a gradient: the columns are zero as well
            continue
        call = matched(record.output, record.call())[1]
        fed, rows, n = sources[id(record)], sweep.attribution.rows(record), sweep.attribution.batch_size(record)
        with connected(record, call, node):
            record.rule.capture(call)
            view = call if sweep.samples is None else call.subset(sweep.samples)
            step = Step(record, record.rule, call, view, call.output, fed, (), backward.largest, rows, n)
            step.at_most = columns_at_a_time(backward, key, step)
            step.go_round = partial(go_round, backward, key, sweep, root)
            arrived = sweep.carry(step)
        for name, p in record.params.items():
            if is_trained(p):
                state = backward.parameters.state_of(p, record.module)
                backward.parameters.collect(state, key, Use(view, record.rule, name, arrived, rows), n)
                if not open_uses[id(p)] and id(p) not in backward.parameters.held:
                    backward.parameters.settle(state, key)
    backward.collect_direct(key, sweep)
    for state in backward.parameters.states.values():
        if key in state.uses:
            backward.parameters.settle(state, key)


def matched(grad: Tensor, call: Call) -> tuple[Tensor, Call]:
    """Bring a call and its gradient to one dtype (autocast mixes them)."""
    tensors = [grad, *call.inputs, *call.params.values()]
    kinds = {t.dtype for t in tensors if t.is_floating_point()}
    if len(kinds) <= 1:
        return grad, call
    dtype = grad.dtype
    for kind in kinds:
        dtype = torch.promote_types(dtype, kind)
    return grad.to(dtype), call.cast(dtype)
