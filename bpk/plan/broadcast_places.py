"""Where functions spread parameters over samples, by autograd's graph: `x + p`, `x * (1 + p)`, `p.expand(n, -1)`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.outer import Some
from bpk.jacobians.second_order.graph import between
from bpk.plan.dependence import POINTWISE, in_between
from bpk.plan.graph import Source
from bpk.plan.row_products import ALL, RowProduct, product_of
from bpk.plan.samples.rows import along_rows
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
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

    def of_samples(self, grad: Tensor, place: int, count: int, some: Some = ALL) -> Tensor:
        """Rows `[V, N, *shape]` of columns `[V, *result]` at the result, of which axis `place` holds the rows.

        Only those of `some` samples.
        """
        from_end = place - (grad.dim() - 1)
        g = grad.movedim(1 + place, 0)[some].movedim(0, 1 + place)
        if isinstance(self.factor, float):
            g = g if self.factor == 1 else g * self.factor
        elif self.factor == NORMALISED:
            x, mean, inverse = (along(engine.saved(self.node, name), from_end, some) for name in STANDARDISED)
            g = g * ((x - mean) * inverse)
        else:
            g = g * along(engine.saved(self.node, self.factor), from_end, some)
        return summed(g, place, g.shape[from_end], self.shape)

    def place_of_rows(self, pulled: Tensor | None, labels: Sequence[Tensor]) -> int | None:
        """That axis, from what arrived at the result: a column, and its tests (see `BroadcastRows`)."""
        if pulled is None or pulled.is_complex():
            return None
        grad, *tests = pulled
        own = (*(1,) * (grad.dim() - len(self.shape)), *self.shape)  # the operand, with as many axes as the result
        for axis, size in enumerate(grad.shape):
            if size != len(labels[0]) or own[axis] != 1 or len(own) != grad.dim():
                continue
            expected = (grad * along_rows(label.to(grad), grad, axis) for label in labels)
            if all(map(torch.equal, tests, expected)):
                return axis
        return None

    def place_on_first_axis(self) -> int | None:
        """The same where it is the first one, if the operand is repeated along that."""
        dims = len(engine.output_shapes(self.node)[0])
        repeated = len(self.shape) < dims or (len(self.shape) == dims and self.shape[0] == 1)
        return 0 if repeated else None


Spread = Broadcast | RowProduct
"""A function of rows and of what is computed from a parameter alone."""


def along(x: Tensor, from_end: int, some: Some) -> Tensor:
    """A part of a tensor along an axis, by its number from the end, where it is not repeated along that."""
    axis = x.dim() + from_end
    return x if axis < 0 or x.shape[axis] == 1 else x.movedim(axis, 0)[some].movedim(0, axis)


def summed(grad: Tensor, axis: int, count: int, shape: Sequence[int]) -> Tensor:
    """Rows `[V, R, *shape]` of columns `[V, *result]`, of which an `axis` of the result holds the rows."""
    own = (*(1,) * (grad.dim() - 1 - len(shape)), *shape)
    goal = [count if k == axis else n for k, n in enumerate(own)]
    return grad.sum_to_size(len(grad), *goal).movedim(1 + axis, 1).reshape(len(grad), count, *shape)


class SpreadPlaces:
    """The functions of a stretch by which parameters, or what is computed from them alone, get to the rows of data."""

    def __init__(self, source: Source) -> None:
        assert source.stretch is not None
        self.source, self.end = source, source.stretch[0]
        self.of_data = in_between(self.end, {edge for _, edge in source.targets})
        self.users: dict[Node, list[tuple[Node, int, Edge]]] = {}
        for node in source.nodes:
            for place, edge in enumerate(node.next_functions):
                above = beyond(edge)[0]
                if above is not None:
                    self.users.setdefault(above, []).append((node, place, edge))
        self.leaves = {id(leaf): node for node in source.nodes if (leaf := leaf_of(node)) is not None}

    def of_parameter(self, k: int, holds_rows: Callable[[Spread], bool]) -> list[Spread] | None:
        """All that a parameter is spread by; `None`: a function of data does something else with it.

        Functions whose results do not hold the rows are passed: they may be of parameters alone.
        """
        found: list[Spread] = []
        for node, use in self.reached(k, holds_rows):
            if use is not None and holds_rows(use):
                found.append(use)
            elif node is None or node in self.of_data:
                return None
        return found if found and are_apart(found) else None

    def candidates(self, params: Iterable[int]) -> list[Spread]:
        """All that parameters may be spread by."""
        each = (use for k in params for _, use in self.reached(k, lambda _: False))
        return list(dict.fromkeys(use for use in each if use is not None))

    def reached(self, k: int, holds_rows: Callable[[Spread], bool]) -> Iterator[tuple[Node | None, Spread | None]]:
        """The functions that a parameter gets to, and what they may do, up to those of data or that hold the rows."""
        leaf = self.leaves.get(id(self.source.trained[k]))
        waiting = [] if leaf is None else [leaf]
        seen = set(waiting)
        while waiting:
            for node, use in self.readers(waiting.pop(), k):
                yield node, use
                ends = node is None or node in self.of_data or (use is not None and holds_rows(use))
                if node is not None and not ends and node not in seen:
                    seen.add(node)
                    waiting.append(node)

    def readers(self, here: Node, k: int) -> Iterator[tuple[Node | None, Spread | None]]:
        """The functions of what a node returns, and what they may do (no function: it is the end, or none is known)."""
        param = self.source.trained[k]
        is_leaf = leaf_of(here) is param
        if here not in self.users:
            yield None, None
        for node, place, edge in self.users.get(here, ()):
            if edge[0] is not here:
                yield None, None
                continue
            shape = tuple(param.shape) if is_leaf else tuple(engine.output_shapes(here)[edge[1]])
            yield node, self.spread(node, place, shape, None if is_leaf else edge)

    def spread(self, node: Node, place: int, shape: tuple[int, ...], start: Edge | None) -> Spread | None:
        """What a function does with an argument, if it spreads that over what may be rows.

        Functions of parameters alone, or of constants that may be data, spread what they return in a larger shape.
        """
        product = product_of(node, place, shape, start)
        if product is not None:
            return product
        factor = factor_of(node, place)
        if factor is None or (node not in self.of_data and tuple(engine.output_shapes(node)[0]) == shape):
            return None
        return Broadcast(node, factor, shape, start)

    def along_rows(self, n: int) -> dict[int, list[Spread]]:
        """By number: parameters that are spread where axis 0 of a result holds the `n` rows at the end.

        On all ways from the end to there, functions keep axis 0 as it is; no other function uses the parameter.
        """
        if not self.source.entrance.plain:
            return {}
        inside, waiting = set(self.source.nodes), [self.end]
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
        known = kept - mixed
        found = {}
        for k in range(len(self.source.trained)):
            uses = self.of_parameter(k, lambda use: use.node in known and use.place_on_first_axis() is not None)
            if uses is not None:
                found[k] = uses
        return found


def are_apart(uses: Collection[Spread]) -> bool:
    """Whether none leads through another one, whose share would count twice: data were passed for parameters."""
    nodes = {use.node for use in uses}
    starts = {use.start[0] for use in uses if use.start is not None}
    inside = (here for start in starts if start is not None for here in between(start, lambda _: False))
    return len(uses) == 1 or nodes.isdisjoint(inside)


def keeps_rows(node: Node, shape: tuple[int, ...], n: int) -> bool:
    """Whether row by row along axis 0, a function's result of a shape depends on that row of arguments that have it."""
    if tuple(shape[:1]) != (n,):
        return False
    name = name_of(type(node))
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
