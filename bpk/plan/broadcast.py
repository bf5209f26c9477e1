"""Individual gradients of parameters that functions spread over all samples: `x + p`, `x * (1 + p)`, `p.expand(n, -1)`.

Autograd sums them over samples where `p` is broadcast. In front of that sum, at the function's result, they stand side
by side: one pass of autograd brings those of all samples, where row by row would take one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.rows_through import RowsThrough
from bpk.plan.broadcast_places import Spread, SpreadPlaces
from bpk.plan.graph import Source, gradient_edge, pull_columns
from bpk.plan.row_products import ALL
from bpk.plan.samples.rows import along_rows
from bpk.plan.spread_rows import SpreadRows

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
        self.places: dict[int, list[tuple[Spread, int]]] = {}
        """By number of a parameter: the functions, and where their results hold the rows."""
        self.spread = SpreadRows(source.trained, self.places, self.count, self.device)
        if source.stretch is None or torch.is_grad_enabled() or self.count < 2:
            return
        spread = SpreadPlaces(source)
        proven = spread.along_rows(self.count)
        for k, uses in proven.items():
            first = [(use, use.place_on_first_axis()) for use in uses]
            self.places[k] = [(use, place) for use, place in first if place is not None]
        rest = [k for k in range(len(source.trained)) if k not in proven]
        candidates = spread.candidates(rest)
        if not candidates:
            return
        column = output if test is None else test()
        labels = labels_of(self.count, column)
        pulled = self.pull(candidates, torch.stack([column, *(column * along_rows(x, column) for x in labels)]))
        where = {use: use.place_of_rows(pulled[use.node], labels) for use in candidates}
        known = {use: place for use, place in where.items() if place is not None}
        for k in rest:
            found = spread.of_parameter(k, known.__contains__)
            if found is not None:
                self.places[k] = [(use, known[use]) for use in found]

    def pull(self, uses: Iterable[Spread], mat: Tensor) -> dict[Node, Tensor | None]:
        """Columns `[V, R, *out]` at the end as columns at the results of functions."""
        assert self.source.stretch is not None
        nodes = list(dict.fromkeys(use.node for use in uses))
        edges = [GradientEdge(node, 0) for node in nodes]
        found = pull_columns([gradient_edge(self.source.stretch)], edges, (self.source.entrance.to_graph(mat),))
        return dict(zip(nodes, found, strict=True))

    def rows(self, mat: Tensor, samples: Tensor | None = None) -> dict[int, Tensor | RowsThrough]:
        """By number of the parameter: `[V, R, *p]` for columns `[V, R, *out]`, of all samples or of some."""
        if not self.places:
            return {}
        some = ALL if samples is None else samples
        return self.spread.rows(self.pull(self.spread.uses, mat), len(mat), mat.dtype, some)


class AtFunction(BroadcastRows):
    """The same where autograd has come to the function that spreads the parameters of a stretch: columns are there.

    The stretch ends at the function `use`, whose result, the `output`, has the rows along axis 0.
    """

    def __init__(self, use: Spread, source: Source, output: Tensor) -> None:
        self.source, self.count, self.device = source, len(output), output.device
        place = use.place_on_first_axis()
        assert place is not None
        self.places = {k: [(use, place)] for k in range(len(source.trained))}
        self.spread = SpreadRows(source.trained, self.places, self.count, self.device)

    def pull(self, uses: Iterable[Spread], mat: Tensor) -> dict[Node, Tensor | None]:
        return {use.node: mat for use in uses}


def labels_of(rows: int, like: Tensor) -> list[Tensor]:
    """Powers of two `[R]`, one for each digit of the number of a row."""
    numbers = torch.arange(rows, device=like.device)
    labels: list[Tensor] = []
    while not labels or rows > 1:
        labels.append(torch.exp2((numbers % BASE - BASE // 2).to(like.dtype)))
        numbers, rows = numbers // BASE, -(-rows // BASE)
    return labels
