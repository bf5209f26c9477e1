"""Where functions spread parameters over samples, by autograd's graph: `x + p`, `x * (1 + p)`, `p.expand(n, -1)`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from bpk.plan.dependence import POINTWISE, in_between
from bpk.plan.graph import Source
from bpk.recording import engine
from bpk.recording.graph.identity import function_name
from bpk.recording.graph.nodes import Edge, leaf_of, signed
from bpk.recording.graph.side_effects import beyond

ROW_BY_ROW = POINTWISE | {"Expand"}
"""Functions that take entries one by one, where arguments are broadcast."""

Factor = float | str
"""What the gradient of a function's result is multiplied with, for an argument: a number, or the other operand, which
the function's node keeps under this name."""


NORMALISED = "normalised"
"""The factor of the weight of `F.layer_norm`."""

STANDARDISED = ("input", "result1", "result2")
"""What its node keeps: `x`, its mean and `1 / std`."""


class Broadcast(NamedTuple):
    """A function that spreads what is computed from a parameter alone (`start`; `None`: the parameter itself)."""

    node: Node
    factor: Factor
    shape: tuple[int, ...]
    start: Edge | None

    def times(self, grad: Tensor) -> Tensor:
        """What comes to the argument, before the sum over what was repeated, from `grad` `[..., *result]`."""
        if isinstance(self.factor, float):
            return grad if self.factor == 1 else grad * self.factor
        if self.factor == NORMALISED:
            x, mean, inverse = (engine.saved(self.node, name) for name in STANDARDISED)
            return grad * ((x - mean) * inverse)
        return grad * engine.saved(self.node, self.factor)

    @property
    def leaves_first_axis(self) -> bool:
        """Whether it is repeated along the first axis of the result."""
        dims = len(engine.output_shapes(self.node)[0])
        return len(self.shape) < dims or (len(self.shape) == dims and self.shape[0] == 1)


def broadcast_parameters(source: Source) -> dict[int, list[Broadcast]]:
    """By number: the functions that spread a parameter, or what is computed from it alone (`1 + p`, `p[:, None]`).

    All that it is used for must be spread. Functions of parameters alone spread what they return in a larger shape.
    """
    assert source.stretch is not None
    of_data = in_between(source.stretch[0], {edge for _, edge in source.targets})
    users: dict[Node, list[tuple[Node, int, Edge]]] = {}
    for node in source.nodes:
        for place, edge in enumerate(node.next_functions):
            above = beyond(edge)[0]
            if above is not None:
                users.setdefault(above, []).append((node, place, edge))
    leaves = {id(leaf): node for node in source.nodes if (leaf := leaf_of(node)) is not None}
    found = {}
    for k, p in enumerate(source.trained):
        uses = uses_of(p, leaves[id(p)], users, of_data) if id(p) in leaves and not p.is_complex() else None
        if uses:
            found[k] = uses
    return found


def uses_of(
    param: Tensor, leaf: Node, users: Mapping[Node, list[tuple[Node, int, Edge]]], of_data: Container[Node]
) -> list[Broadcast] | None:
    """Where a parameter is spread (`None`: a function does something else with it)."""
    found: list[Broadcast] = []
    waiting, seen = [leaf], {leaf}
    while waiting:
        here = waiting.pop()
        if here not in users:
            return None  # it is the end itself
        for node, place, edge in users[here]:
            if edge[0] is not here:
                return None
            shape = tuple(param.shape) if here is leaf else tuple(engine.output_shapes(here)[edge[1]])
            factor = factor_of(node, place)
            alone = node not in of_data
            if factor is not None and not (alone and tuple(engine.output_shapes(node)[0]) == shape):
                found.append(Broadcast(node, factor, shape, None if here is leaf else edge))
            elif not alone:
                return None
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return found


def broadcast_along_rows(
    source: Source, n: int, spread: Mapping[int, list[Broadcast]] | None = None
) -> dict[int, list[Broadcast]]:
    """By number: parameters that are spread where axis 0 of a result holds the `n` rows at the end, by its functions.

    On all ways from the end to there, functions keep axis 0 as it is; no other function uses the parameter. All that
    are `spread` may be known (see `broadcast_parameters`).
    """
    if source.stretch is None or not source.entrance.plain:
        return {}
    inside, waiting = set(source.nodes), [source.stretch[0]]
    kept, mixed = set(waiting), set[Node | None]()
    while waiting:
        here = waiting.pop()
        assert here is not None
        shapes = () if here in mixed else engine.output_shapes(here)
        keeps = len(shapes) == 1 and keeps_rows(here, shapes[0], n)
        for above, number in here.next_functions:
            if above not in inside or above in mixed or (keeps and above in kept):
                continue
            shape = engine.output_shapes(above)[0] if keeps and number == 0 else None
            same = shape is not None and tuple(shape[:1]) == (n,) and len(shape) == len(shapes[0])
            (kept if same else mixed).add(above)
            waiting.append(above)
    found: dict[int, list[Broadcast]] = {}
    for k, uses in (broadcast_parameters(source) if spread is None else spread).items():
        if all(use.node in kept - mixed and use.leaves_first_axis for use in uses):
            found[k] = uses
    return found


def keeps_rows(node: Node, shape: tuple[int, ...], n: int) -> bool:
    """Whether row by row along axis 0, a function's result of a shape depends on that row of arguments that have it."""
    if tuple(shape[:1]) != (n,):
        return False
    name = function_name(node)
    return name in ROW_BY_ROW or (name == "Cat" and signed(engine.saved(node, "dim")) % len(shape) != 0)


def factor_of(node: Node, place: int) -> Factor | None:
    """What a function multiplies an argument with that it broadcasts; `None` if it does anything else.

    What is complex is left to autograd, which knows what to conjugate.
    """
    name = node.name()
    if engine.kind_of_output(node, 0)[1].is_complex:
        return None
    if name == "ExpandBackward0":
        return 1.0
    if name in ("AddBackward0", "SubBackward0"):
        alpha = 1.0 if place == 0 else float(engine.saved(node, "alpha"))
        return -alpha if place == 1 and name == "SubBackward0" else alpha
    if name == "MulBackward0":
        other = "self" if place else "other"
        return other if engine.keeps_tensor(node, other) else None  # what a checkpoint keeps is handed out only once
    if name == "NativeLayerNormBackward0" and place == 2:
        return 1.0
    if name == "NativeLayerNormBackward0" and place == 1:
        return NORMALISED if all(engine.keeps_tensor(node, kept) for kept in STANDARDISED) else None
    return None
