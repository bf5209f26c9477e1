"""Convolutions without a layer: `F.conv2d(x, self.weight, self.bias)`, found in autograd's graph.

The node keeps its input and its options, and leads to the parameters. As with products (`parameter_products.py`), the
call is written down from it during the backward pass, as if a layer had made it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.function_module import standing_for
from bpk.recording import engine
from bpk.recording.graph.identity import function_name
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import OPERANDS, Edge
from bpk.recording.graph.ownership import can_be_written_down, give
from bpk.recording.graph.parameter_operands import TRANSPOSES, is_of_parameters, parameter_behind
from bpk.recording.record import Record
from bpk.rules import REGISTRY

CONVOLUTION = "Convolution"
OPTIONS = ("transposed", "stride", "padding", "dilation", "groups", "output_padding")
"""What its node keeps beside tensors."""


def module_of(kind: type[nn.Module], function: str, **options: Any) -> nn.Module:
    """A module of such a class, with these options and without parameters of its own."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.__dict__.update(options, _bpk_path=function)
    return module


STRAIGHT = [standing_for(layer, f"F.conv{k}d") for k, layer in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1)]
TRANSPOSED = [
    standing_for(layer, f"F.conv_transpose{k}d")
    for k, layer in enumerate((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1)
]


@lru_cache(maxsize=256)
def convolution_layer(axes: int, *options: bool | int | tuple[int, ...]) -> nn.Module:
    """What stands for the layer: one for all calls with the same options, so that forms of graphs are found again."""
    known = dict(zip(OPTIONS, options, strict=True))
    kind = (TRANSPOSED if known["transposed"] else STRAIGHT)[axes - 1]
    name = f"F.conv{'_transpose' if known['transposed'] else ''}{axes}d"
    return module_of(kind, name, **known, padding_mode="zeros")


def recover_convolution(edge: Edge, extended: Container[Tensor], again: Callable[[], bool]) -> Record | None:
    """The record of a convolution with a parameter, from its node; `None` for all others.

    Args:
        edge: Leads to the node.
        extended: The parameters that get fields.
        again: Tells whether what a checkpoint has dropped may be computed again for that.
    """
    node = edge[0]
    if node is None or function_name(node) != CONVOLUTION or not can_be_written_down(node, "input", again):
        return None
    (_, place), (_, of_weight) = OPERANDS[CONVOLUTION]
    given, *others = (node.next_functions[k] for k in (place, of_weight, 2))
    params: dict[str, Tensor] = {}
    for name, (above, _) in zip(("weight", "bias"), others, strict=True):
        if above is None and name == "bias":
            continue  # there is none, or it is frozen
        found, walk = parameter_behind(above)
        if found is None or found not in extended or any(one.name() in TRANSPOSES for one in walk):
            return None
        params[name] = found
    if is_of_parameters(given[0]):
        return None
    x, weight = kept_by(node, "input", "weight")
    shapes = {"weight": tuple(weight.shape), "bias": tuple(engine.saved(node, "bias_sym_sizes_opt") or ())}
    if any(tuple(p.shape) != shapes[name] for name, p in params.items()):
        return None
    if x is None or x.is_complex() or not 3 <= x.dim() <= 5 or x.device != params["weight"].device:
        return None
    options = (engine.saved(node, name) for name in OPTIONS)
    module = convolution_layer(x.dim() - 2, *(tuple(x) if isinstance(x, (tuple, list)) else x for x in options))
    out = engine.like_output(node)  # no rule reads it
    record = Record(
        module, REGISTRY.find(module), Binding(module, (x,)), (x,), (given,), {0: out}, {0: 0}, params=params
    )
    give(node, record)
    return record
