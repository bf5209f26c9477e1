"""Something small that functions compute from parameters alone, once for all samples: a table of position biases, say.

Rows of such parameters are columns at the small tensor, times one Jacobian that is the same for all of them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.second_order.graph import between
from bpk.plan.graph import gradient_edge, pull_columns
from bpk.recording import engine
from bpk.recording.graph.nodes import Edge

FASTER = 8
"""How many numbers a product of matrices takes in the time in which autograd's functions pass one."""

LARGEST = 2048
"""Up to how many entries the Jacobian of what follows the bottleneck is written out."""


class ParameterBottleneck:
    """The smallest tensor that `start`, a function of parameters alone, is computed from.

    It is looked for as long as one function follows another; where they branch, or at a parameter, the search ends.
    """

    def __init__(self, start: Edge, device: torch.device) -> None:
        self.device = device
        self.start = self.edge = start
        smallest, here = entries(start), start
        while (above := only_argument(here)) is not None:
            here = above
            if entries(here) < smallest and not engine.kind_of_output(*here)[1].is_complex:  # it counts twice
                self.edge, smallest = here, entries(here)
        self.entries = smallest
        self.jacobians: dict[int, Tensor] = {}
        node = self.edge[0]
        assert node is not None
        inside = between(node, lambda _: False)
        self.work = sum(shape.numel() for each in inside for shape in engine.output_shapes(each))
        """How many numbers one product of autograd's passes behind it."""

    def pays(self, rows: int) -> bool:
        """Whether so many rows are had for less through it than one by one."""
        return self.entries * (self.entries / FASTER + self.work / max(1, rows)) < self.work

    def columns(self, rows: Tensor) -> Tensor:
        """Rows `[V, R, *start]` as columns `[V, R, D]`."""
        flat = rows.flatten(0, 1)
        if self.edge != self.start:
            pays = entries(self.start) < min(len(flat), LARGEST)
            flat = as_rows(flat) @ self.lead.to(flat.dtype) if pays else self.pull(flat)
        return flat.reshape(*rows.shape[:2], self.entries)

    def pull(self, mat: Tensor) -> Tensor:
        """Columns `[V, *start]` as columns `[V, D]`."""
        (found,) = pull_columns([gradient_edge(self.start)], [gradient_edge(self.edge)], (mat,))
        return mat.new_zeros(len(mat), self.entries) if found is None else as_rows(found)

    @cached_property
    def lead(self) -> Tensor:
        """The Jacobian `[start, D]` of the functions in between."""
        return self.pull(unit(self.start, self.device))

    def jacobian(self, param: Tensor) -> Tensor:
        """`[D, *p]`, found once."""
        known = self.jacobians.get(id(param))
        if known is None:
            each = unit(self.edge, self.device)
            (found,) = pull_columns([gradient_edge(self.edge)], [param], (each,))
            known = each.new_zeros(self.entries, *param.shape) if found is None else found
            self.jacobians[id(param)] = known
        return known


def unit(edge: Edge, device: torch.device) -> Tensor:
    """A column `[D, *x]` for each entry of a tensor of the graph."""
    shape, kind = engine.kind_of_output(*edge)
    return torch.eye(shape.numel(), dtype=kind, device=device).reshape(shape.numel(), *shape)


def entries(edge: Edge) -> int:
    """How many entries a tensor of the graph has."""
    return engine.kind_of_output(*edge)[0].numel()


def only_argument(edge: Edge) -> Edge | None:
    """What a function's result is computed from, if that is one tensor and no parameter."""
    node = edge[0]
    assert node is not None
    above = [each for each in node.next_functions if each[0] is not None]
    if len(above) != 1 or len(engine.output_shapes(node)) != 1 or above[0][0].name() == engine.ACCUMULATE:  # type: ignore[union-attr]
        return None
    return above[0]
