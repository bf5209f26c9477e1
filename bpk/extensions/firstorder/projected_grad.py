"""Random projections of individual gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.options import seeding
from bpk.extensions.over_batches import Rows
from bpk.fields.along_blocks import along_blocks
from bpk.fields.statistics import Uses
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import as_rows
from bpk.utils.projections import Block, Matrices, sides


class Projecting:
    """Projections of rows with a random matrix `R` that follows from the seed and the parameter's shape."""

    def __init__(
        self,
        k: int | tuple[int, int] = 64,
        kind: str = "gaussian",
        seed: int = 0,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        super().__init__(subsampling)  # type: ignore[call-arg]  # of the extension beside which this stands
        self.k, self.kind, self.seed, self.sides = k, kind, seeding(seed), sides(k, kind)
        self._matrices = Matrices()

    def projections(self, uses: Uses) -> Tensor:
        """Those of all rows: `[V, n, k]`."""
        p = uses.param
        if self.kind == "factored" and p.dim() > 1:
            return uses.projected(*self.factors(p.shape, p)).flatten(2)
        return along_blocks(uses, self.matrix(p.shape, p))

    def of_gradients(self, gradients: Tensor, shape: torch.Size) -> Tensor:
        """`[..., k]`, of gradients `[..., P]` of a parameter of this shape."""
        if self.kind == "factored" and len(shape) > 1:
            left, right = self.factors(shape, gradients)
            return (left @ gradients.unflatten(-1, (shape[0], shape[1:].numel())) @ right.T).flatten(-2)
        rest = shape[1:].numel()
        blocks = self.matrix(shape, gradients)
        return add_up(gradients[..., some.start * rest : some.stop * rest] @ as_rows(rows).T for some, rows in blocks)

    def whole(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """`R` `[k, P]` for the entries of a parameter of this shape."""
        return torch.cat([as_rows(rows) for _, rows in self.matrix(shape, like)], 1)

    def matrix(self, shape: Sequence[int], like: Tensor) -> Iterable[Block]:
        """The same in blocks `[k, ...]` of some indices of the first axis."""
        return self._matrices.blocks(self.kind, self.sides[0] * self.sides[1], shape, self.seed, like)

    def factors(self, shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
        """`R_o` `[k_o, first axis]`, `R_i` `[k_i, others]`."""
        sizes = zip(self.sides, (shape[0], shape[1:].numel()), (self.seed, ~self.seed), strict=True)
        blocks = [self._matrices.blocks("gaussian", k, (width,), s, like) for k, width, s in sizes]
        left, right = (torch.cat([rows for _, rows in each], 1) for each in blocks)
        return left, right


class ProjectedGrad(Projecting, GradientExtension):
    """Random projections `[N, k]` of the individual gradients, per parameter, in the field `projected_grad`.

    `projected_grad[n] = R grad_batch[n].flatten()`, with entries of variance `1/k`, so that inner products of gradients
    stay the same on average. `R` follows from the seed and the parameter's shape, and is made a block at a time; a
    small one is kept. `"rademacher"` and `"sparse"` take a third of the time that normal numbers take to draw.
    `"factored"` has `R = kron(R_o, R_i)` over the first and the other axes of a parameter with two axes or more: inputs
    and output gradients are projected by themselves. `bpk.projected_gradients` gives the
    projection of the model's.

    Args:
        k: How many numbers; for `"factored"` a square number, or a pair `(k_o, k_i)`.
        kind: `"gaussian"`, `"rademacher"` (signs), `"sparse"` (a third of signs), `"factored"` (Gaussian).
        seed: Of the random numbers; torch's generators are not used.
        subsampling: Indices of the samples considered (all by default).

    Source: Park et al. (2023), TRAK, arXiv:2303.14186; Choe et al. (2024), LoGra, arXiv:2405.13954, for factors.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(ProjectedGrad(k=16, kind="factored")):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.projected_grad.shape
    torch.Size([8, 16])
    """

    field = "projected_grad"
    form = Form.SAMPLE_VECTORS
    over_batches = Rows()

    def value(self, uses: Uses) -> Tensor:
        return self.projections(uses)[0]

    def definition(self, plain: PlainAutograd) -> Tensor:
        return self.of_gradients(plain.gradients, plain.vector.shape)


EXTENSIONS = (ProjectedGrad,)
