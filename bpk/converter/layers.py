"""Functions with a parameter among their arguments that have a layer of their own: `F.linear(x, self.weight)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bpk.converter.tracing import nodes_in

CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
CONV_TRANSPOSE = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def linear(weight: Tensor, **given: Any) -> nn.Module:
    """`nn.Linear` of this shape."""
    return nn.Linear(weight.shape[1], weight.shape[0])


def convolution(layer: type[nn.Module], weight: Tensor, **given: Any) -> nn.Module:
    """A convolution of this shape."""
    groups = given.get("groups", 1)
    return layer(weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), **given)


def transposed(layer: type[nn.Module], weight: Tensor, **given: Any) -> nn.Module:
    """A transposed convolution of this shape."""
    groups = given.get("groups", 1)
    return layer(weight.shape[0], weight.shape[1] * groups, tuple(weight.shape[2:]), **given)


def embedding(weight: Tensor, **given: Any) -> nn.Module:
    """`nn.Embedding` of this shape."""
    return nn.Embedding(weight.shape[0], weight.shape[1], **given)


def layer_norm(weight: Tensor, normalized_shape: Any, **given: Any) -> nn.Module:
    """`nn.LayerNorm` over these axes."""
    return nn.LayerNorm(tuple(normalized_shape), **given)


def group_norm(weight: Tensor, num_groups: int, **given: Any) -> nn.Module:
    """`nn.GroupNorm` with so many groups."""
    return nn.GroupNorm(num_groups, weight.shape[0], **given)


def prelu(weight: Tensor, **given: Any) -> nn.Module:
    """`nn.PReLU` with so many slopes."""
    return nn.PReLU(weight.numel())


def conv(layer: type[nn.Module]) -> Callable[..., nn.Module]:
    """Build this convolution."""
    return lambda weight, **given: convolution(layer, weight, **given)


def conv_transpose(layer: type[nn.Module]) -> Callable[..., nn.Module]:
    """Build this transposed convolution."""
    return lambda weight, **given: transposed(layer, weight, **given)


LAYERS: dict[Any, tuple[tuple[str, ...], Callable[..., nn.Module]]] = {
    F.linear: (("input", "weight", "bias"), linear),
    F.conv1d: (CONV, conv(nn.Conv1d)),
    F.conv2d: (CONV, conv(nn.Conv2d)),
    F.conv3d: (CONV, conv(nn.Conv3d)),
    F.conv_transpose1d: (CONV_TRANSPOSE, conv_transpose(nn.ConvTranspose1d)),
    F.conv_transpose2d: (CONV_TRANSPOSE, conv_transpose(nn.ConvTranspose2d)),
    F.conv_transpose3d: (CONV_TRANSPOSE, conv_transpose(nn.ConvTranspose3d)),
    F.embedding: (
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        embedding,
    ),
    F.layer_norm: (("input", "normalized_shape", "weight", "bias", "eps"), layer_norm),
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), group_norm),
    F.prelu: (("input", "weight"), prelu),
}
"""By function: the names of its arguments, and how to build the layer."""


def as_layer(node: fx.Node, parameters: dict[str, nn.Parameter]) -> tuple[nn.Module, fx.Node, dict[str, str]] | None:
    """The layer that stands for a call, its input, and `{name in the layer: name in the model}` of its parameters.

    `None` where the function has no layer, or where weight or bias are not parameters themselves.
    """
    if node.op != "call_function" or node.target not in LAYERS:
        return None
    names, build = LAYERS[node.target]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x = given.pop("input")
    held: dict[str, str] = {}
    for name in ("weight", "bias"):
        value = given.pop(name, None)
        if isinstance(value, fx.Node) and value.op == "get_attr" and value.target in parameters:
            held[name] = str(value.target)
        elif value is not None:
            return None
    if "weight" not in held or not isinstance(x, fx.Node):
        return None
    if nodes_in(tuple(given.values())):
        return None
    weight = parameters[held["weight"]]
    with torch.random.fork_rng(devices=[]):
        module = build(weight, **given)
    for name in [n for n, _ in module.named_parameters()]:
        module.register_parameter(name, parameters[held[name]] if name in held else None)
    return module, x, held
