"""Where a call is connected to autograd's graph: its rule sees the batch axis in front, the graph sees the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from bpk.jacobians.core.side_by_side import reshaped


@dataclass(frozen=True)
class MatrixLayout:
    """How a matrix of the graph, or a stack of them, is rows of features: `features` is the axis that goes last.

    The sizes of the `others` become those of the `axes` that the rule sees: `N`, then positions. One number, such as a
    loss, is what it is.
    """

    features: int
    others: tuple[int, ...]
    axes: tuple[int, ...]

    def to_rule(self, mat: Tensor) -> Tensor:
        """`[V, *tensor] -> [V, *axes, features]`."""
        if mat.dim() == 1:
            return mat
        mat = mat.movedim(1 + self.features, -1)
        if self.axes == self.others:
            return mat
        axes = self.axes if len(self.axes) > 1 else (mat.shape[1:-1].numel(),)
        return reshaped(mat, (len(mat), *axes, mat.shape[-1]))

    def to_graph(self, mat: Tensor) -> Tensor:
        """The way back."""
        if mat.dim() == 1:
            return mat
        if self.axes != self.others:
            others = list(self.others)
            if self.axes == (prod(others),) and self.axes[0] in others:  # columns of some samples have some of the rows
                others[others.index(self.axes[0])] = mat.shape[1]
            mat = reshaped(mat, (len(mat), *others, mat.shape[-1]))
        return mat.movedim(-1, 1 + self.features)


@dataclass(frozen=True)
class Port:
    """One input or one result of a recorded call.

    `axis` is the batch axis of the tensor. Of a call several of whose results are used, the rule sees all of them
    flattened, side by side: `shape` is that of this result without the batch axis, and it lies at `start` of `total`.
    The graph may see several axes as one, or another one last: `layout` says how.
    """

    axis: int = 0
    shape: tuple[int, ...] = ()
    start: int = 0
    total: int = 0
    layout: MatrixLayout | None = None

    @property
    def plain(self) -> bool:
        """Whether rule and graph see the same."""
        return self.axis == 0 and self.total == 0 and self.layout is None

    def to_rule(self, mat: Tensor) -> Tensor:
        """Columns `[V, *tensor]` of the graph as columns `[V, N, *out]` of the rule."""
        if self.layout is not None:
            mat = self.layout.to_rule(mat)
        if self.axis:
            mat = mat.movedim(1 + self.axis, 1)
        if not self.total:
            return mat
        size = prod(self.shape)
        zeros = [mat.new_zeros(*mat.shape[:2], k) for k in (self.start, self.total - self.start - size)]
        return torch.cat([zeros[0], mat.flatten(2) if mat.dim() > 2 else mat[..., None], zeros[1]], 2)

    def to_graph(self, mat: Tensor) -> Tensor:
        """Columns `[V, N, *out]` of the rule as columns `[V, *tensor]` of the graph."""
        if self.total:
            mat = mat[..., self.start : self.start + prod(self.shape)].reshape(*mat.shape[:2], *self.shape)
        mat = mat.movedim(1, 1 + self.axis) if self.axis else mat
        return mat if self.layout is None else self.layout.to_graph(mat)

    def one_to_rule(self, x: Tensor) -> Tensor:
        """A single tensor of the graph as the rule sees it."""
        return x if self.plain else self.to_rule(x[None])[0]

    def one_to_graph(self, x: Tensor) -> Tensor:
        """A single tensor `[N, *out]` of the rule as the graph sees it."""
        return x if self.plain else self.to_graph(x[None])[0]


@dataclass(frozen=True)
class OneSample:
    """A port through which the whole batch is seen as one sample: `[V, 1, N, *out]`."""

    port: Port
    plain = False

    def to_rule(self, mat: Tensor) -> Tensor:
        """Columns of the graph, with an axis for the only sample."""
        return self.port.to_rule(mat)[:, None]

    def to_graph(self, mat: Tensor) -> Tensor:
        """The way back."""
        return self.port.to_graph(mat[:, 0])

    def one_to_rule(self, x: Tensor) -> Tensor:
        """A single tensor of the graph, with an axis for the only sample."""
        return self.port.one_to_rule(x)[None]

    def one_to_graph(self, x: Tensor) -> Tensor:
        """The way back."""
        return self.port.one_to_graph(x[0])


PLAIN = Port()
"""Batch axis in front, and the only result that is used."""
