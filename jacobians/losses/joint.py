"""A loss of several predictions, as a loss of one: inputs that depend on parameters, flattened, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.side_by_side import beside, taken_apart
from bpk.jacobians.losses.curvature import Curvature
from bpk.jacobians.losses.loss_call import SideBySide


@dataclass(frozen=True)
class Joint:
    """A rule and a call with one prediction, made of the inputs whose shapes `[*in]` are in `shapes`.

    Of a single input the prediction keeps its shape; several give `[N, D]`, one behind the other.

    >>> from torch import nn
    >>> loss, x, y = nn.CosineEmbeddingLoss(), torch.ones(2, 3), torch.ones(2)
    >>> from bpk.jacobians.losses.loss import AutodiffLoss
    >>> joint = AutodiffLoss().joint(Call(loss, (x, 2 * x, y), {}, loss(x, 2 * x, y)), (0, 1))
    >>> joint.call.inputs[0].shape
    torch.Size([2, 6])
    >>> [(index, part.shape) for index, part in joint.split(torch.zeros(5, 2, 6)).items()]
    [(0, torch.Size([5, 2, 3])), (1, torch.Size([5, 2, 3]))]
    """

    rule: Curvature
    call: Call
    shapes: Mapping[int, torch.Size]

    def split(self, mat: Tensor) -> dict[int, Tensor]:
        """Columns `[V, N, *prediction]` as columns `[V, N, *in]` by input."""
        if len(self.shapes) == 1:
            (index,) = self.shapes
            return {index: mat}
        return taken_apart(mat, self.shapes, 2)

    def merge(self, parts: Mapping[int, Tensor]) -> Tensor:
        """The inverse of `split`; inputs that are missing count as zero, at least one must be there."""
        if len(self.shapes) == 1:
            return parts[next(iter(self.shapes))]
        like = next(iter(parts.values()))
        every = [parts[i] if i in parts else like.new_zeros(*like.shape[:2], *s) for i, s in self.shapes.items()]
        return beside(every, 2)

    def blocks(self, matrix: Tensor) -> dict[tuple[int, int], Tensor]:
        """A matrix `[D, D]` over the entries of one joint prediction, in blocks `[D_i, D_j]` by pair of inputs."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        rows = zip(self.shapes, matrix.split(sizes), strict=True)
        return {(i, j): b for i, row in rows for j, b in zip(self.shapes, row.split(sizes, 1), strict=True)}


def joined(rule: Curvature, call: Call, wrts: tuple[int, ...]) -> Joint:
    """A `rule` for the inputs `wrts` of a call, side by side."""
    shapes = {i: call.inputs[i].shape[1:] for i in wrts}
    if wrts == (0,):
        return Joint(rule, call, shapes)
    first = [call.inputs[i] for i in wrts]
    prediction = first[0] if len(wrts) == 1 else beside(first, 1)
    others = [x for i, x in enumerate(call.inputs) if i not in wrts]
    return Joint(rule, Call(SideBySide(call.options, shapes), (prediction, *others), call.params, call.output), shapes)
