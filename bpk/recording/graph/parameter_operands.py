"""A parameter as an operand of a function: which one it is, and how its entries were rearranged on the way."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.arrangement import AXES, SHAPE, Arrangement, Step
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import leaf_of, signed

TRANSPOSES = ("T", "Transpose", "Permute")
"""Functions that exchange axes."""
CAST = "ToCopy"
"""The one that changes the precision (autocast)."""
RESHAPES = ("View", "UnsafeView", "ReshapeAlias")
SAME_ORDER = (*RESHAPES, "Unsqueeze", "Squeeze", "Clone", "Alias", CAST)
"""Those that keep the entries of a tensor in their order."""
REARRANGING = (*TRANSPOSES, *SAME_ORDER)
REPEATS = "Expand"


class Operand(NamedTuple):
    """A parameter, times constants (`None`: as it is), and the nodes that rearrange its entries, the last one first."""

    param: nn.Parameter
    scale: Tensor | None
    walk: list[Node]


def weight_of(node: Node | None, right: bool) -> tuple[Operand, Arrangement] | None:
    """The parameter that an operand is made of, and how it becomes the matrix `[in, out]`.

    Several matrices are one where each is the same, or where there is but one; else samples may have their own.
    """
    if node is not None and name_of(type(node)) == REPEATS:  # one matrix for each row
        before, after = tuple(engine.saved(node, "self_sym_sizes")), tuple(engine.output_shapes(node)[0])
        if before[-2:] != after[-2:] or prod(before[:-2]) != 1:
            return None
        node = node.next_functions[0][0]
    found = operand_behind(node)
    if found is None:
        return None
    shape, steps = tuple(found.param.shape), list[Step]()
    for one in reversed(found.walk):
        shape = tuple(engine.output_shapes(one)[0])
        steps.append((AXES, axes_of(one, len(shape))) if name_of(type(one)) in TRANSPOSES else (SHAPE, shape))
    if len(shape) < 2 or prod(shape[:-2]) != 1:
        return None
    steps += [(SHAPE, shape[-2:])] if len(shape) > 2 else []
    steps += [] if right else [(AXES, (1, 0))]
    return found, Arrangement(tuple(found.param.shape), tuple(steps))


def operand_behind(node: Node | None) -> Operand | None:
    """The parameter that a node hands out, rearranged, maybe times constants: a mask, a number."""
    param, walk = parameter_behind(node)
    if param is not None:
        return Operand(param, None, walk)
    end = walk[-1].next_functions[0][0] if walk else node
    if end is None or name_of(type(end)) != "Mul" or not is_cast_once(walk):
        return None
    for place, other in enumerate(("other", "self")):
        param = parameter_at(end.next_functions[place][0])
        constant = end.next_functions[1 - place][0] is None and engine.keeps_tensor(end, other)
        if param is not None and constant and param.shape == engine.output_shapes(end)[0]:
            return Operand(param, engine.saved(end, other).detach(), walk)
    return None


def parameter_behind(node: Node | None) -> tuple[nn.Parameter | None, list[Node]]:
    """The parameter whose entries a node hands out, and the nodes that rearrange them, the last one first.

    They may be cast once, to the precision of the product. Where they are cast back, they were rounded on purpose.
    """
    walk: list[Node] = []
    while node is not None and name_of(type(node)) in REARRANGING:
        walk.append(node)
        node = node.next_functions[0][0]
    return parameter_at(node) if is_cast_once(walk) else None, walk


def is_cast_once(walk: Sequence[Node]) -> bool:
    """Whether at most one of the nodes changes the precision."""
    return [name_of(type(node)) for node in walk].count(CAST) < 2


def parameter_at(node: Node | None) -> nn.Parameter | None:
    """The parameter whose gradient a node accumulates."""
    leaf = leaf_of(node)
    return leaf if isinstance(leaf, nn.Parameter) else None


def axes_of(node: Node, dim: int) -> tuple[int, ...]:
    """The order in which a node hands on axes."""
    name = name_of(type(node))
    if name == "Permute":
        return tuple(signed(axis) % dim for axis in engine.saved(node, "dims"))
    order = list(range(dim))
    if name == "T":
        return tuple(reversed(order))
    one, other = (signed(engine.saved(node, axis)) % dim for axis in ("dim0", "dim1"))
    order[one], order[other] = order[other], order[one]
    return tuple(order)
