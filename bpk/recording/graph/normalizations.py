"""Normalisations without a layer: `F.layer_norm(x, shape, self.weight, self.bias)`.

So do subclasses of `nn.LayerNorm` and the like that have a forward pass of their own. The node keeps input, statistics
and most options, and leads to the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.unseen import Unseen, standing_for
from bpk.recording.record import Record


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
    """What stands for the layer."""
    return standing_for(*LAYERS[name])


def read_normalization(call: Unseen) -> Record | None:
    """The record of a normalisation with a parameter; `None` of others.

    One with the statistics of its batch is left to autograd.
    """
    kind = name_of(type(call.node))
    if not {"input", "weight", *KEPT[kind]} <= engine.saved_names(type(call.node)):
        return None  # another version of torch
    params, scale = call.weight_and_bias() or ({}, None)
    if not params or scale is not None or ("training" in KEPT[kind] and engine.saved(call.node, "training")):
        return None
    kept = call.given_to_layer(params, 0, "input", "weight", *KEPT[kind])
    if kept is None or not kept[0].numel():
        return None
    x, weight, *others = kept
    options = options_of(kind, x, *others)
    if options is None:
        return None
    if weight is not None:
        params = {"weight": weight, **params}  # also a frozen one
    return call.written(stand_in(kind), x, params=params, binding=Binding(options, (x,)))


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
