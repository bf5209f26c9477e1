"""Individual gradients of parameters that functions spread over all samples: `x + p`, `x - p`, `p.expand(n, -1)`.

Autograd sums them over samples where `p` is broadcast. In front of that sum, at the function's result, they stand side
by side: one pass of autograd brings those of all samples, where row by row would take one for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.products import add_up
from bpk.plan.graph import Source, gradient_edge, pull_columns
from bpk.recording import engine
from bpk.recording.bystanders import beyond
from bpk.recording.graph_nodes import leaf_of
from bpk.recording.identity import function_name, words

BASE = 16
"""How many powers of two tell rows from each other in one test."""

ROW_BY_ROW = words("Add Div Expand Gelu Identity Mul NativeDropout Neg Relu Silu Sub Tanh")
"""Functions that take entries one by one, where arguments are broadcast."""

Spread = tuple[Node, float]
"""A function's node, and what the gradient of its result is multiplied with, for the parameter."""


def spread_rows(source: Source, at_end: Tensor) -> dict[str, Tensor]:
    """Rows `[R, *p]` by number of the parameter, where it is only spread, from the gradient `[R, *out]` at the end.

    An axis of a function's result holds the rows if each gets its gradient from the row at the end that has the same
    number, and from no other. That is tested here, for this gradient: rows at the end are multiplied with powers of
    two, which differ between any two rows in one of the tests, and must come out multiplied with the same, exactly.
    """
    spreads = {} if torch.is_grad_enabled() or len(at_end) < 2 else spread_parameters(source)
    nodes = list(dict.fromkeys(node for uses in spreads.values() for node, _ in uses))
    if source.stretch is None or not nodes:
        return {}
    labels = labels_of(len(at_end), at_end)
    columns = [at_end, *(at_end * like_rows(label, at_end, 0) for label in labels)]
    edges = [GradientEdge(node, 0) for node in nodes]
    found = pull_columns([gradient_edge(source.stretch)], edges, (source.entrance.to_graph(torch.stack(columns)),))
    pulled = dict(zip(nodes, found, strict=True))
    rows: dict[str, Tensor] = {}
    for k, uses in spreads.items():
        parts = [rows_at(pulled[node], factor, labels, source.trained[k].shape) for node, factor in uses]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            rows[str(k)] = add_up(known).to(at_end.dtype)
    return rows


def spread_parameters(source: Source) -> dict[int, list[Spread]]:
    """By number: the functions that use a parameter, where all of these only spread it."""
    numbers = {id(p): k for k, p in enumerate(source.trained)}
    found: dict[int, list[Spread]] = {}
    other: set[int] = set()
    for node in source.nodes:
        for place, edge in enumerate(node.next_functions):
            leaf = leaf_of(beyond(edge)[0])
            if leaf is None or id(leaf) not in numbers:
                continue
            k, factor = numbers[id(leaf)], factor_of(node, place)
            if factor is None or leaf_of(edge[0]) is None:
                other.add(k)
            else:
                found.setdefault(k, []).append((node, factor))
    return {k: uses for k, uses in found.items() if k not in other}


def side_by_side(source: Source, n: int) -> dict[int, list[Spread]]:
    """By number: parameters that are spread where axis 0 of a result holds the `n` rows at the end, by its functions.

    On all ways from the end to there, functions keep axis 0 as it is; no other function uses the parameter.
    """
    if source.stretch is None or not source.entrance.plain:
        return {}
    inside, waiting = set(source.nodes), [source.stretch[0]]
    kept, mixed = set(waiting), set[Node | None]()
    while waiting:
        here = waiting.pop()
        assert here is not None
        keeps = here not in mixed and keeps_rows(here, n)
        for above, number in here.next_functions:
            if above not in inside or above in mixed or (keeps and above in kept):
                continue
            same = keeps and number == 0 and tuple(engine.output_shapes(above)[0][:1]) == (n,)
            same = same and len(engine.output_shapes(above)[0]) == len(engine.output_shapes(here)[0])
            (kept if same else mixed).add(above)
            waiting.append(above)
    found: dict[int, list[Spread]] = {}
    for k, uses in spread_parameters(source).items():
        p = source.trained[k]
        dims = [len(engine.output_shapes(node)[0]) if node in kept - mixed else -1 for node, _ in uses]
        if all(p.dim() < dim or (p.dim() == dim and p.shape[0] == 1) for dim in dims):
            found[k] = uses
    return found


def keeps_rows(node: Node, n: int) -> bool:
    """Whether row by row along axis 0, a function's result depends on the same row of its arguments that have it."""
    shapes, name = engine.output_shapes(node), function_name(node)
    if len(shapes) != 1 or tuple(shapes[0][:1]) != (n,):
        return False
    return name in ROW_BY_ROW or (name == "Cat" and engine.saved(node, "dim") not in (0, 2**64 - len(shapes[0])))


def factor_of(node: Node, place: int) -> float | None:
    """What a function multiplies an argument with that it broadcasts; `None` if it does anything else."""
    name = node.name()
    if name == "ExpandBackward0":
        return 1.0
    if name in ("AddBackward0", "SubBackward0"):
        alpha = 1.0 if place == 0 else engine.saved(node, "alpha")
        return -alpha if place == 1 and name == "SubBackward0" else alpha
    return None  # a product would have to read what it keeps, which a checkpoint hands out only once


def labels_of(rows: int, like: Tensor) -> list[Tensor]:
    """Powers of two `[R]`, one for each digit of the number of a row."""
    numbers = torch.arange(rows, device=like.device)
    labels: list[Tensor] = []
    while not labels or rows > 1:
        labels.append(torch.exp2((numbers % BASE - BASE // 2).to(like.dtype)))
        numbers, rows = numbers // BASE, -(-rows // BASE)
    return labels


def like_rows(label: Tensor, x: Tensor, axis: int) -> Tensor:
    """`[R]` along an axis of `x`."""
    return label.view(*(-1 if k == axis else 1 for k in range(x.dim())))


def rows_at(pulled: Tensor | None, factor: float, labels: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Rows `[R, *shape]` from what arrived at a result, the gradient and its tests; `None` where no axis holds rows."""
    if pulled is None or pulled.is_complex():
        return None
    grad, *tests = pulled
    own = (*(1,) * (grad.dim() - len(shape)), *shape)  # the parameter, with as many axes as the result
    for axis, size in enumerate(grad.shape):
        if size != len(labels[0]) or own[axis] != 1 or len(own) != grad.dim():
            continue
        expected = (grad * like_rows(label.to(grad), grad, axis) for label in labels)
        if all(map(torch.equal, tests, expected)):
            goal = [size if k == axis else n for k, n in enumerate(own)]
            return (grad * factor).sum_to_size(goal).movedim(axis, 0).reshape(size, *shape)
    return None
