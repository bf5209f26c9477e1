"""The bottleneck of a stretch: one tensor that is a linear function of all that feeds the stretch.

A sum `x = t_1 + ... + t_k` that is normalised depends on `k` calls; its second derivative is that of a
function of `x` alone. It is found there, with the entries of one tensor in the place of those of `k`, and columns go
on to the calls as gradients do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from bpk.jacobians.second_order.probing import draw, marks, same, tolerance
from bpk.plan.dependence import in_between
from bpk.plan.graph import Source, gradient_edge, pull_columns
from bpk.plan.samples.rows import along_rows
from bpk.recording import engine
from bpk.recording.graph.nodes import Edge, is_linear
from bpk.recording.graph.ports import PLAIN, Port
from bpk.recording.graph.side_effects import beyond


@dataclass(eq=False)
class FromBottleneck(Source):
    """A stretch from its bottleneck to its end. It has no targets, but the bottleneck."""

    bottleneck: Edge = (None, 0)

    def target_edges(self) -> list[GradientEdge]:
        return [gradient_edge(self.bottleneck)]

    @property
    def exits(self) -> list[Port]:
        return [PLAIN]


@dataclass(frozen=True)
class Bottleneck:
    """The linear part of a stretch, and the rest of it (`after`)."""

    source: Source
    after: FromBottleneck

    def lead(self, mat: Tensor) -> list[Tensor]:
        """Columns `[V, N, *bottleneck]` as columns at the outputs of the calls that feed the stretch."""
        edges = self.source.target_edges()
        found = pull_columns(self.after.target_edges(), edges, (mat,), create_graph=False)
        kinds = [engine.kind_of_output(edge.node, edge.output_nr) for edge in edges]
        full = [
            torch.zeros(len(mat), *shape, dtype=dtype, device=mat.device) if part is None else part
            for part, (shape, dtype) in zip(found, kinds, strict=True)
        ]
        return [port.to_rule(part) for port, part in zip(self.source.exits, full, strict=True)]

    def keeps_rows(self, like: Tensor) -> bool:
        """Whether row `n` of the bottleneck is made of rows `n` of what calls return, as many as in `like` (probed)."""
        shape, dtype = engine.kind_of_output(*self.after.bottleneck)
        count = len(like)
        if dtype is not like.dtype or not shape or shape[0] != count:
            return False
        column, most = draw((1, *shape), like, 0), tolerance(like)
        expected = self.lead(column)
        if most < 0 or any(x.shape[1] != count for x in expected):
            return False
        for factors in marks(torch.arange(count, device=like.device), count, dtype):
            found = self.lead(column * along_rows(factors, column, 1))
            if not all(same(x, y * along_rows(factors, y, 1), most) for x, y in zip(found, expected, strict=True)):
                return False
        return True


def bottleneck_of(source: Source) -> Bottleneck | None:
    """The bottleneck that is nearest to the end of a stretch that several calls feed (`None`: there is none).

    Functions are visited in the order of a backward pass. Where all that is still to be visited hangs on one tensor,
    this is a bottleneck, if nothing but linear functions of what the calls return follows.
    """
    if source.stretch is None or len(source.targets) < 2:
        return None
    ends = {edge for _, edge in source.targets}
    order = in_between(source.stretch[0], ends)
    above = {node: [edge for edge in map(beyond, node.next_functions) if edge[0] is not None] for node in order}
    curved = 0
    for number, (node, edges) in enumerate(above.items(), 1):
        if not is_linear(node) or any(edge not in ends and edge[0] not in order for edge in edges):
            curved = number  # it is curved, or depends on something that is no call's
    hanging = {source.stretch}
    for number, (node, edges) in enumerate(above.items()):
        if number >= curved and len(hanging) == 1:
            (bottleneck,) = hanging
            kept = source.consumer, source.index, (), source.stretch, source.leaves, source.trained, source.nodes
            return Bottleneck(source, FromBottleneck(*kept, bottleneck)) if bottleneck[0] is node else None
        leading = (edge for edge in edges if edge in ends or edge[0] in order)
        hanging = {edge for edge in hanging if edge[0] is not node}.union(leading)
    return None
