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

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.function_module import Plain
from bpk.recording import engine
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.ownership import can_be_written_down, give
from bpk.recording.graph.side_effects import beyond
from bpk.recording.record import Record
from bpk.rules import REGISTRY

ADD = "AddBackward0"


@cache
def sum_function() -> nn.Module:
    """What stands for the layer: one for all calls, because what is known of a graph's form is found by its modules."""
    from bpk.rules.arithmetic import SumModule  # rules are read when one is looked for first

    class SumFunction(SumModule, Plain):  # type: ignore[misc, valid-type]
        """Stands for a call of `x + y`."""

    module = SumFunction()
    module.__dict__["_bpk_path"] = "torch.add"
    return module


def recover_sum(edge: Edge) -> Record | None:
    """The record of a sum of two tensors of one kind, from its node; `None` for all others."""
    node = edge[0]
    if node is None or not is_sum(node) or not can_be_written_down(node):
        return None
    terms = tuple(map(beyond, node.next_functions))
    module, out = sum_function(), engine.like_output(node)
    record = Record(module, REGISTRY.find(module), Binding(module, (out, out)), (out, out), terms, {0: out}, {0: 0})
    give(node, record)
    return record


def is_recovered_sum(record: Record) -> bool:
    """Whether a record is that of such a sum."""
    return record.module is sum_function()


def is_sum(node: Node) -> bool:
    """Whether a node adds two tensors that are like its result, real, of which none is a parameter."""
    if node.name() != ADD or engine.saved(node, "alpha") != 1:
        return False
    kind = engine.kind_of_output(node, 0)
    if kind[1].is_complex or not kind[0]:  # as for layers: autograd knows what to conjugate; numbers have no rows
        return False
    for above, nr in node.next_functions:
        if above is None or above.name() == engine.ACCUMULATE or engine.kind_of_output(above, nr) != kind:
            return False
    return True
