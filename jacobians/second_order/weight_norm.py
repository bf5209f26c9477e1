"""Weight normalisation, `w = g v / |v|`, with a gradient that can be differentiated once more.

Torch's own gradient takes the norms `|v|` for constants when it is differentiated (seen up to 2.15), so that Hessians
are silently wrong. Where the function is still to be called, `weight_norm` stands for it; where a graph has recorded
it, `gradient` takes the place of torch's (see `corrected.py`).
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.engine import is_checkpointed, leaf_of, saved
from bpk.jacobians.core.errors import UnsupportedLayer

FUSED = "WeightNormInterfaceBackward0"
"""What autograd calls torch's fused function."""


def lengths(v: Tensor, dim: int) -> Tensor:
    """The norms over all axes but one (`-1`: over all), broadcast against `v`."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    return v.square().sum(axes, keepdim=True).sqrt() if axes else v.abs()


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`torch._weight_norm`, as a composition."""
    return v * (g / lengths(v, dim))


Gradients = tuple[Tensor | None, ...]


def gradient(node: Node, sent: Gradients, arrived: Gradients) -> Gradients:
    """What autograd should send to `v` and `g`, as a function of what has arrived, of `v` and of `g`."""
    if arrived[0] is None:
        return sent
    v, g, dim = operand(node, "v", 0), operand(node, "g", 1), saved(node, "dim")
    length = lengths(v, dim)
    unit = v / length
    along = (arrived[0] * unit).sum_to_size(g.shape)
    found = (arrived[0] - along * unit) * (g / length), along
    return tuple(None if before is None else right for before, right in zip(sent, found, strict=True))


def operand(node: Node, name: str, place: int) -> Tensor:
    """`v` or `g`. What a checkpoint computes again is handed out once, to torch: it must be a parameter there."""
    if not is_checkpointed(node, name):
        return saved(node, name)
    leaf = leaf_of(node.next_functions[place][0])
    if leaf is None:
        raise UnsupportedLayer(
            f"Second derivatives cannot pass a weight normalisation in a checkpoint, whose {name} is no parameter "
            "that is trained.",
            "torch's own are wrong, and what a checkpoint computes again is handed out only once.",
            "normalise the weight outside of the checkpoint.",
        )
    return leaf
