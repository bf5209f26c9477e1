"""Nodes of autograd's graph whose gradients are right, and the derivatives of these are not: right ones in their place.

Beside weight normalisation (`weight_norm.py`), these are normalisations that have a bias and no weight. Torch (seen in
2.13) takes the gradient of their bias for a constant: a sum of what arrives. And it is the modulus of complex numbers,
and the standard deviation: where one is zero, derivatives of torch's gradient are NaN, as those of a quotient that is
masked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod

import torch
from torch.autograd.graph import Node

from bpk.jacobians.core.engine import is_checkpointed, saved
from bpk.jacobians.second_order import weight_norm
from bpk.jacobians.second_order.weight_norm import Gradients

LAYER_NORM = "NativeLayerNormBackward0"
NORMALISATIONS = (LAYER_NORM, *(f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen")))
"""What autograd calls those that have a right second derivative otherwise. Their arguments: input, weight, bias."""

MODULUS = "AbsBackward0"

DEVIATIONS = ("StdBackward0", "StdMeanBackward0")
"""Torch's gradient is zero where all entries are equal (a unit that is silent at all steps), and its derivatives there
are NaN."""


@contextmanager
def corrected(nodes: Iterable[Node]) -> Iterator[None]:
    """Inside, gradients that pass these nodes of autograd's graph may be differentiated once more."""
    with ExitStack() as stack:
        for node in nodes:
            right = right_gradient(node)
            if right is not None:
                stack.callback(node.register_hook(partial(right, node)).remove)
        yield


def right_gradient(node: Node) -> Callable[[Node, Gradients, Gradients], Gradients] | None:
    """What computes the gradients at a node in the place of torch (`None`: torch's are right)."""
    name = node.name()
    if name == weight_norm.FUSED:
        return weight_norm.gradient
    if name == MODULUS and not is_checkpointed(node, "self") and saved(node, "self").is_complex():
        return of_modulus
    if name in DEVIATIONS and not is_checkpointed(node, "self") and not saved(node, "self").is_complex():
        return of_deviation
    if name in NORMALISATIONS and node.next_functions[1][0] is None and node.next_functions[2][0] is not None:
        return with_bias
    return None


def with_bias(node: Node, sent: Gradients, arrived: Gradients) -> Gradients:
    """What a normalisation should send to its input, its weight and its bias: the last is a sum of what has arrived."""
    grad, bias = arrived[0], sent[2]
    if grad is None or bias is None:
        return sent
    kept = range(grad.dim() - bias.dim(), grad.dim()) if node.name() == LAYER_NORM else (1,)
    summed = [axis for axis in range(grad.dim()) if axis not in kept]
    return *sent[:2], (grad.sum(summed) if summed else grad).to(bias.dtype)


def of_modulus(node: Node, sent: Gradients, arrived: Gradients) -> Gradients:
    """What the modulus of complex numbers sends: `z / |z|` times what has arrived, and nothing at zero."""
    if arrived[0] is None:
        return sent
    z = saved(node, "self")
    zero = z == 0
    length = torch.where(zero, 1.0, z.real.square() + z.imag.square()).sqrt()
    return (arrived[0] * (torch.where(zero, 0.0, z) / length),)


def of_deviation(node: Node, sent: Gradients, arrived: Gradients) -> Gradients:
    """What a standard deviation sends, and a mean with it, maybe: nothing of the first where it is zero."""
    x, axes = saved(node, "self"), reduced_axes(node)
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    correction, count = saved(node, "correction"), x.numel() // max(1, prod(kept))
    degrees = count - (1 if correction is None else correction)
    if degrees <= 0:
        return sent
    deviation = saved(node, "result0" if len(arrived) > 1 else "result").reshape(kept)
    zero = deviation == 0
    parts = []
    if arrived[0] is not None:
        slope = arrived[0].reshape(kept) / (torch.where(zero, 1.0, deviation) * degrees)
        parts.append((x - x.mean(axes, keepdim=True)) * torch.where(zero, 0.0, slope))
    if len(arrived) > 1 and arrived[1] is not None:
        parts.append((arrived[1].reshape(kept) / count).expand_as(x))
    return (sum(parts[1:], parts[0]),) if parts else sent


def reduced_axes(node: Node) -> list[int]:
    """Over which axes a node's function has reduced its argument; torch keeps negative ones as unsigned numbers."""
    dim, axes = saved(node, "self").dim(), saved(node, "dim")
    return [(axis - 2**64 if axis >= 2**63 else axis) % dim for axis in axes] if axes else [*range(dim)]
