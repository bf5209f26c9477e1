"""Normalisations without a layer: `F.layer_norm(x, shape, self.weight, self.bias)`, found in autograd's graph.

So do subclasses of `nn.LayerNorm` and the like that have a forward pass of their own. The node keeps input, statistics
and most options, and leads to the parameters. As with products (`parameter_products.py`), the call is written down from
it during the backward pass, as if a layer had made it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.function_module import standing_for
from bpk.recording import engine
from bpk.recording.graph.convolutions import module_of
from bpk.recording.graph.identity import function_name
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.ownership import LEFT, can_be_written_down, give
from bpk.recording.graph.parameter_operands import is_of_parameters, parameter_at
from bpk.recording.record import Record
from bpk.rules import REGISTRY


@dataclass(frozen=True)
class OfFeatures:
    """The options of a layer normalisation."""

    normalized_shape: tuple[int, ...]
    eps: float


@dataclass(frozen=True)
class OfGroups:
    """The options of a group normalisation."""

    num_groups: int
    eps: float


@dataclass(frozen=True)
class OfBatch:
    """The options of a batch normalisation in evaluation mode."""

    running_mean: Tensor
    running_var: Tensor
    eps: float
    training: bool = False


Options = OfFeatures | OfGroups | OfBatch

LAYERS: dict[str, tuple[type[nn.Module], str]] = {
    "NativeLayerNorm": (nn.LayerNorm, "F.layer_norm"),
    "NativeGroupNorm": (nn.GroupNorm, "F.group_norm"),
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), (nn.BatchNorm1d, "F.batch_norm")),
}
"""By node: which layer does what it does, and what users write in its place."""

RUNNING = ("running_mean", "running_var")
KEPT: dict[str, tuple[str, ...]] = {
    "NativeLayerNorm": ("normalized_shape", "result2"),
    "NativeGroupNorm": ("group", "result2"),
    "NativeBatchNorm": ("training", "eps", *RUNNING),
    **dict.fromkeys(("CudnnBatchNorm", "MiopenBatchNorm"), ("training", "epsilon", *RUNNING)),
}
"""By node: under which names it keeps the options, or what they follow from (of groups, torch 2.14 keeps no `eps`)."""


@cache
def stand_in(name: str) -> nn.Module:
    """What stands for the layer: one for all calls, because what is known of a graph's form is found by its modules."""
    layer, function = LAYERS[name]
    return module_of(standing_for(layer, function), function)


def recover_normalization(edge: Edge, extended: Container[Tensor], again: Callable[[], bool]) -> Record | None:
    """The record of a normalisation with a parameter, from its node; `None` for all others.

    One with the statistics of its batch is left to autograd.

    Args:
        edge: Leads to the node.
        extended: The parameters that get fields.
        again: Tells whether what a checkpoint has dropped may be computed again for that.
    """
    node = edge[0]
    if node is None or (kind := function_name(node)) not in LAYERS or not can_be_written_down(node, "input", again):
        return None
    if not {"input", "weight", *KEPT[kind]} <= engine.saved_names(type(node)):
        return None  # another version of torch
    if edge[1]:  # its statistics are used: nobody shall write it down
        engine.belongings(node)[LEFT] = True
        return None
    given, *others = node.next_functions
    params: dict[str, Tensor] = {}
    for name, (above, _) in zip(("weight", "bias"), others, strict=True):
        if above is None:
            continue  # there is none, or it is frozen
        found = parameter_at(above)
        if found is None or found not in extended or found is params.get("weight"):
            return None
        params[name] = found
    if not params or is_of_parameters(given[0]) or ("training" in KEPT[kind] and engine.saved(node, "training")):
        return None
    x, weight, *kept = kept_by(node, "input", "weight", *KEPT[kind])  # at once: a checkpoint computes all of it again
    if weight is not None:
        params = {"weight": weight, **params}  # also a frozen one
    if not x.numel() or any(p.device != x.device for p in params.values()):
        return None
    options = options_of(kind, x, *kept)
    if options is None:
        return None
    module, out = stand_in(kind), engine.like_output(node)  # no rule reads it
    binding = Binding(options, (x,))
    record = Record(module, REGISTRY.find(module), binding, (x,), (given,), {0: out}, {0: 0}, params=params)
    give(node, record)
    return record


def options_of(kind: str, x: Tensor, *kept: Any) -> Options | None:
    """The options of a call, from what its node keeps; `None`: those of batches, or with a negative eps."""
    if "result2" in KEPT[kind]:
        of, rstd = kept
        eps = eps_of(x, rstd)
        if eps is None:
            return None
        return OfGroups(of, eps) if kind == "NativeGroupNorm" else OfFeatures(tuple(of), eps)
    _, eps, mean, var = kept
    return None if mean is None or var is None else OfBatch(mean, var, eps)


def eps_of(x: Tensor, rstd: Tensor) -> float | None:
    """What was added to variances, of which `rstd = 1 / sqrt(var + eps)` is known for each group of `x`, in order.

    The smallest variance tells best: beside the others, the rounding in it is small. A group that is not finite tells
    nothing. `None`: it is negative by more than rounding, which torch allows.
    """
    with torch.no_grad():
        rows, known = x.reshape(rstd.numel(), -1), rstd.flatten()
        least = known.nan_to_num(0.0).argmax()
        group, known = rows[least].to("cpu", torch.float64), known[least].to("cpu", torch.float64)
        eps, rounding = float(known**-2 - group.var(correction=0)), 8 * torch.finfo(x.dtype).eps * float(known**-2)
        return max(eps, 0.0) if eps >= -rounding else None
