"""In how short a format a model computes: a copy in double precision may still go through float32 (a softmax in it)."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.engine import formats
from bpk.jacobians.second_order.graph import between


def coarsest(output: Tensor) -> torch.dtype:
    """The shortest of the formats of all results on the way to an output that depend on parameters.

    What comes out is rounded as in this format, by plain autograd as well as by `bpk`, and not always alike.
    """
    nodes = [] if output.grad_fn is None else between(output.grad_fn, lambda _: False)
    seen = {dtype for node in nodes for dtype in formats(node) if dtype.is_floating_point}
    return max(seen, key=lambda dtype: torch.finfo(dtype).eps, default=output.dtype)
