"""Convolutions without a layer: `F.conv2d(x, self.weight, self.bias)`.

The node keeps its input and its options, and leads to the parameters.
"""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from bpk.recording.graph.unseen import Unseen, standing_for
from bpk.recording.record import Record

CONVOLUTION = "Convolution"
OPTIONS = ("transposed", "stride", "padding", "dilation", "groups", "output_padding")
"""What its node keeps beside tensors."""

STRAIGHT = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@lru_cache(maxsize=256)
def convolution_layer(axes: int, *options: bool | int | tuple[int, ...]) -> nn.Module:
    """What stands for the layer."""
    known = dict(zip(OPTIONS, options, strict=True))
    layers, name = (TRANSPOSED, "conv_transpose") if known["transposed"] else (STRAIGHT, "conv")
    return standing_for(layers[axes - 1], f"F.{name}{axes}d", **known, padding_mode="zeros")


def read_convolution(call: Unseen) -> Record | None:
    """The record of a convolution with a parameter; `None` of others."""
    params, scale = call.weight_and_bias() or ({}, None)
    kept = call.given_to_layer(params, 0, "input", *OPTIONS) if "weight" in params else None
    if kept is None or not 3 <= kept[0].dim() <= 5:
        return None
    x, *options = kept
    module = convolution_layer(x.dim() - 2, *(tuple(x) if isinstance(x, (tuple, list)) else x for x in options))
    return call.written(module, x, params=params, scale=scale)
