"""Functions with a parameter among their arguments that have a layer of their own: `F.linear(x, self.weight)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from bpk.converter.tracing import nodes_in
from bpk.jacobians.core.conversion import signature_of
from bpk.jacobians.core.random_state import RandomState
from bpk.rules import REGISTRY


def convolution(layer: type[nn.Module], weight: Tensor, groups: int = 1, **options: Any) -> nn.Module:
    """A convolution of this shape, transposed or not."""
    channels = [weight.shape[1] * groups, len(weight)]
    if issubclass(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        channels.reverse()
    return layer(*channels, tuple(weight.shape[2:]), groups=groups, **options)


LAYERS: dict[Any, Callable[..., nn.Module]] = {
    F.linear: lambda weight: nn.Linear(weight.shape[1], weight.shape[0]),
    F.conv1d: partial(convolution, nn.Conv1d),
    F.conv2d: partial(convolution, nn.Conv2d),
    F.conv3d: partial(convolution, nn.Conv3d),
    F.conv_transpose1d: partial(convolution, nn.ConvTranspose1d),
    F.conv_transpose2d: partial(convolution, nn.ConvTranspose2d),
    F.conv_transpose3d: partial(convolution, nn.ConvTranspose3d),
    F.embedding: lambda weight, **options: nn.Embedding(*weight.shape, **options),
    F.layer_norm: lambda weight, normalized_shape, **options: nn.LayerNorm(tuple(normalized_shape), **options),
    F.group_norm: lambda weight, num_groups, **options: nn.GroupNorm(num_groups, len(weight), **options),
    F.prelu: lambda weight: nn.PReLU(weight.numel()),
}
"""By function: how to build the layer, from its weight and the options that it is called with."""


def as_layer(node: fx.Node, parameters: dict[str, nn.Parameter]) -> tuple[nn.Module, fx.Node, dict[str, str]] | None:
    """The layer that stands for a call, its input, and `{name in the layer: name in the model}` of its parameters.

    `None` where the function has no layer, or where weight or bias are not parameters themselves.
    """
    if node.op != "call_function" or node.target not in LAYERS:
        return None
    options = signature_of(node.target).bind(*node.args, **node.kwargs).arguments
    x = options.pop("input")
    names: dict[str, str] = {}
    for name in ("weight", "bias"):
        value = options.pop(name, None)
        if isinstance(value, fx.Node) and value.op == "get_attr" and value.target in parameters:
            names[name] = str(value.target)
        elif value is not None:
            return None
    if "weight" not in names or not isinstance(x, fx.Node) or nodes_in(tuple(options.values())):
        return None
    with RandomState.now().again():
        module = LAYERS[node.target](parameters[names["weight"]], **options)
    if REGISTRY.find(module) is None:  # another forward pass was set on its class
        return None
    for name in [n for n, _ in module.named_parameters()]:
        module.register_parameter(name, parameters[names[name]] if name in names else None)
    return module, x, names
