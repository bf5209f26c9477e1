"""Individual gradients of parameters that functions spread over all samples: `x + p`, `x * (1 + p)`, `p.expand(n, -1)`.

Autograd sums them over samples where `p` is broadcast. In front of that sum, at the function's result, they stand side
by side: one pass of autograd brings those of all samples, where row by row would take one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.rows_through import RowsThrough
from bpk.plan.broadcast_places import Broadcast, broadcast_along_rows, broadcast_parameters
from bpk.plan.graph import Source, gradient_edge, pull_columns
from bpk.plan.parameter_bottleneck import ParameterBottleneck
from bpk.plan.samples.rows import along_rows
from bpk.recording.graph.nodes import Edge

BASE = 16
"""How many powers of two tell rows from each other in one test."""


class BroadcastRows:
    """Rows of parameters that the functions of a stretch only spread, from columns at its end.

    An axis of a function's result holds the rows if each gets its gradient from the row at the end that has the same
    number, and from no other. Where the functions on the way do not tell, this is tested: rows of a column at the end
    are multiplied with powers of two, which differ between any two rows in one of the tests, and must come out
    multiplied with the same, exactly.

    Args:
        source: The stretch.
        output: What is at its end, `[R, *out]`.
        test: Makes the column of a test: numbers of which none is zero by chance. Default: `output`.
    """

    def __init__(self, source: Source, output: Tensor, test: Callable[[], Tensor] | None = None) -> None:
        self.source, self.count, self.device = source, len(output), output.device
        self.places: dict[int, list[tuple[Broadcast, int]]] = {}
        """By number of a parameter: the functions, and which axis of their results holds the rows."""
        self.bottlenecks: dict[Edge, ParameterBottleneck] = {}
        found = {} if torch.is_grad_enabled() or self.count < 2 else broadcast_parameters(source)
        if source.stretch is None or not found:
            return
        proven = broadcast_along_rows(source, self.count, found)
        self.places = {k: [(use, 0) for use in uses] for k, uses in proven.items()}
        rest = {k: uses for k, uses in found.items() if k not in proven}
        if rest:
            column = output if test is None else test()
            labels = labels_of(self.count, column)
            pulled = self.pull(rest, torch.stack([column, *(column * along_rows(x, column) for x in labels)]))
            for k, uses in rest.items():
                axes = [axis_of_rows(pulled[use.node], labels, use.shape) for use in uses]
                known = [(use, axis) for use, axis in zip(uses, axes, strict=True) if axis is not None]
                if len(known) == len(uses):
                    self.places[k] = known

    def pull(self, uses: Mapping[int, Iterable[Broadcast]], mat: Tensor) -> dict[Node, Tensor | None]:
        """Columns `[V, R, *out]` at the end as columns at the results of functions."""
        assert self.source.stretch is not None
        nodes = list(dict.fromkeys(use.node for some in uses.values() for use in some))
        edges = [GradientEdge(node, 0) for node in nodes]
        found = pull_columns([gradient_edge(self.source.stretch)], edges, (self.source.entrance.to_graph(mat),))
        return dict(zip(nodes, found, strict=True))

    def rows(self, mat: Tensor) -> dict[int, Tensor | RowsThrough]:
        """By number of the parameter: `[V, R, *p]` for columns `[V, R, *out]`."""
        if not self.places:
            return {}
        pulled = self.pull({k: [use for use, _ in uses] for k, uses in self.places.items()}, mat)
        found: dict[int, Tensor | RowsThrough] = {}
        narrowed: dict[tuple[Node, Edge], Tensor] = {}  # several parameters share what is computed from them
        for k, uses in self.places.items():
            p = self.source.trained[k]
            parts = [
                (use, summed(use.times(grad), axis, self.count, use.shape))
                for use, axis in uses
                if (grad := pulled[use.node]) is not None
            ]
            through = self.through_bottlenecks(parts, p, mat.dtype, narrowed)
            if through is not None:
                found[k] = through
                continue
            each = [at_parameter(rows, use, p) for use, rows in parts]
            found[k] = (add_up(each) if each else mat.new_zeros(len(mat), self.count, *p.shape)).to(mat.dtype)
        return found

    def through_bottlenecks(
        self,
        parts: Sequence[tuple[Broadcast, Tensor]],
        param: Tensor,
        dtype: torch.dtype,
        narrowed: dict[tuple[Node, Edge], Tensor],
    ) -> RowsThrough | None:
        """The rows of a parameter through small tensors that are computed from it (`None`: there are none).

        `narrowed` keeps columns there, by function and by what it is given. Functions may be in another precision.
        """
        columns: list[Tensor] = []
        jacobians: list[Tensor] = []
        for use, rows in parts:
            if use.start is None or not self.bottleneck(use.start).pays(rows.shape[0] * rows.shape[1]):
                return None
            narrow, place = self.bottleneck(use.start), (use.node, use.start)
            if place not in narrowed:
                narrowed[place] = narrow.columns(rows).to(dtype)
            columns.append(narrowed[place])
            jacobians.append(narrow.jacobian(param).to(dtype))
        return RowsThrough(torch.cat(columns, 2), torch.cat(jacobians)) if columns else None

    def bottleneck(self, start: Edge) -> ParameterBottleneck:
        """What `start` is computed from, looked for once."""
        if start not in self.bottlenecks:
            self.bottlenecks[start] = ParameterBottleneck(start, self.device)
        return self.bottlenecks[start]


def at_parameter(rows: Tensor, use: Broadcast, param: Tensor) -> Tensor:
    """Rows `[V, R, ...]` of what a function spreads as rows of the parameter that this is computed from."""
    if use.start is None:
        return rows
    (found,) = pull_columns([gradient_edge(use.start)], [param], (rows.flatten(0, 1),))
    return rows.new_zeros(*rows.shape[:2], *param.shape) if found is None else found.unflatten(0, rows.shape[:2])


def summed(grad: Tensor, axis: int, count: int, shape: Sequence[int]) -> Tensor:
    """Rows `[V, R, *shape]` of columns `[V, *result]`, of which an `axis` of the result holds the rows."""
    own = (*(1,) * (grad.dim() - 1 - len(shape)), *shape)
    goal = [count if k == axis else n for k, n in enumerate(own)]
    return grad.sum_to_size(len(grad), *goal).movedim(1 + axis, 1).reshape(len(grad), count, *shape)


def labels_of(rows: int, like: Tensor) -> list[Tensor]:
    """Powers of two `[R]`, one for each digit of the number of a row."""
    numbers = torch.arange(rows, device=like.device)
    labels: list[Tensor] = []
    while not labels or rows > 1:
        labels.append(torch.exp2((numbers % BASE - BASE // 2).to(like.dtype)))
        numbers, rows = numbers // BASE, -(-rows // BASE)
    return labels


def axis_of_rows(pulled: Tensor | None, labels: Sequence[Tensor], shape: Sequence[int]) -> int | None:
    """Which axis of a function's result holds the rows, from what arrived there: a column, and its tests."""
    if pulled is None or pulled.is_complex():
        return None
    grad, *tests = pulled
    own = (*(1,) * (grad.dim() - len(shape)), *shape)  # the parameter, with as many axes as the result
    for axis, size in enumerate(grad.shape):
        if size != len(labels[0]) or own[axis] != 1 or len(own) != grad.dim():
            continue
        expected = (grad * along_rows(label.to(grad), grad, axis) for label in labels)
        if all(map(torch.equal, tests, expected)):
            return axis
    return None
