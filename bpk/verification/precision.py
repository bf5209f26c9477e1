"""In how short a format a model computes: a copy in double precision may still go through float32 (a softmax in it)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.recording import engine


def coarsest(output: Tensor) -> torch.dtype:
    """The shortest of the formats of all results on the way to an output that depend on parameters.

    What comes out is rounded as in this format, by plain autograd as well as by `bpk`, and not always alike.
    """
    found, seen, todo = output.dtype, set[Node | None]([None]), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for number in range(len(engine.output_shapes(node))):
            _, dtype = engine.kind_of_output(node, number)
            if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(found).eps:
                found = dtype
        todo += [above for above, _ in node.next_functions]
    return found
