"""A parameter as an operand of a function: which one it is, and how its entries were rearranged on the way."""

from __future__ import annotations

from math import prod

from torch import nn
from torch.autograd.graph import Node

from bpk.jacobians.core.arrangement import AXES, SHAPE, Arrangement, Step
from bpk.recording import engine
from bpk.recording.graph.nodes import is_of_leaves, leaf_of, signed

TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
"""Nodes that exchange axes."""
CAST = "ToCopyBackward0"
"""The node that changes the precision (autocast)."""
RESHAPES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
SAME_ORDER = (
    *RESHAPES,
    "UnsqueezeBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "CloneBackward0",
    "AliasBackward0",
    CAST,
)
"""Nodes that keep the entries of a tensor in their order."""
REPEATS = "ExpandBackward0"


def weight_of(node: Node | None, right: bool) -> tuple[nn.Parameter, Arrangement] | None:
    """The parameter that an operand is, and how it becomes the matrix `[in, out]`.

    Several matrices are one where each is the same, or where there is but one; else samples may have their own.
    """
    if node is not None and node.name() == REPEATS:  # one matrix for each row
        before, after = tuple(engine.saved(node, "self_sym_sizes")), tuple(engine.output_shapes(node)[0])
        if before[-2:] != after[-2:] or prod(before[:-2]) != 1:
            return None
        node = node.next_functions[0][0]
    weight, walk = parameter_behind(node)
    if weight is None:
        return None
    shape, steps = tuple(weight.shape), list[Step]()
    for one in reversed(walk):
        shape = tuple(engine.output_shapes(one)[0])
        steps.append((AXES, axes_of(one, len(shape))) if one.name() in TRANSPOSES else (SHAPE, shape))
    if len(shape) < 2 or prod(shape[:-2]) != 1:
        return None
    steps += [(SHAPE, shape[-2:])] if len(shape) > 2 else []
    steps += [] if right else [(AXES, (1, 0))]
    return weight, Arrangement(tuple(weight.shape), tuple(steps))


def parameter_behind(node: Node | None) -> tuple[nn.Parameter | None, list[Node]]:
    """The parameter whose entries a node hands out, and the nodes that rearrange them, the last one first.

    They may be cast once, to the precision of the product. Where they are cast back, they were rounded on purpose.
    """
    walk: list[Node] = []
    while node is not None and (node.name() in TRANSPOSES or node.name() in SAME_ORDER):
        walk.append(node)
        node = node.next_functions[0][0]
    casts = sum(one.name() == CAST for one in walk)
    return parameter_at(node) if casts < 2 else None, walk


def parameter_at(node: Node | None) -> nn.Parameter | None:
    """The parameter whose gradient a node accumulates."""
    leaf = leaf_of(node)
    return leaf if isinstance(leaf, nn.Parameter) else None


def is_of_parameters(node: Node | None) -> bool:
    """Whether an operand is made of parameters: the product computes one of something else, its rows are no samples."""
    return parameter_behind(node)[0] is not None or is_of_leaves(node)


def axes_of(node: Node, dim: int) -> tuple[int, ...]:
    """The order in which a node hands on axes."""
    if node.name() == "PermuteBackward0":
        return tuple(signed(axis) % dim for axis in engine.saved(node, "dims"))
    order = list(range(dim))
    if node.name() == "TBackward0":
        return tuple(reversed(order))
    one, other = (signed(engine.saved(node, name)) % dim for name in ("dim0", "dim1"))
    order[one], order[other] = order[other], order[one]
    return tuple(order)
