"""Sums of two tensors of one kind, found in autograd's graph: where residual branches meet.

Behind `x = x + f(x)` once for each block, what a block reads is a sum over all blocks in front of it. To follow each
reader up to those blocks takes the square of their number. So a sum is a call, written down from its node during the
backward pass: each reader, and each sum, is fed by the sum in front of it, and what is curved behind is curved in the
sum alone.
"""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.autograd.graph import Node

from bpk.recording import engine
from bpk.recording.graph.unseen import Unseen, standing_for
from bpk.recording.record import Record

ADD = "Add"


@cache
def sum_function() -> nn.Module:
    """What stands for the layer."""
    from bpk.rules.arithmetic import SumModule  # rules are read when one is looked for first

    return standing_for(SumModule, "torch.add", weights=None)


def read_sum(call: Unseen) -> Record | None:
    """The record of a sum of two tensors of one kind; `None` of others."""
    if not is_sum(call.node):
        return None
    out = engine.like_output(call.node)
    return call.written(sum_function(), out, out, output=out)


def is_recovered_sum(record: Record) -> bool:
    """Whether a record is that of such a sum."""
    return record.module is sum_function()


def is_sum(node: Node) -> bool:
    """Whether a node adds two tensors that are like its result, real, of which none is a parameter."""
    if node.name() != "AddBackward0" or engine.saved(node, "alpha") != 1:  # not `x + 1`
        return False
    kind = engine.kind_of_output(node, 0)
    if kind[1].is_complex or not kind[0]:  # as for layers: autograd knows what to conjugate; numbers have no rows
        return False
    for above, nr in node.next_functions:
        if above is None or above.name() == engine.ACCUMULATE or engine.kind_of_output(above, nr) != kind:
            return False
    return True
