"""A network below, a loss above: the flat vector of all predictions between them, and which sample each entry is of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import placeholder
from bpk.plan.parts import in_parts
from bpk.verification.objective import Points, gradients_of
from bpk.verification.problem import Problem
from bpk.verification.samples import SamplesMix, owners


class Split:
    """The predictions `[P]`, side by side if there are several, and derivatives of the objective with respect to them.

    If an entry depends on several samples, all belong to one, the whole batch, and `mixing` says why.
    """

    def __init__(self, problem: Problem, points: Points) -> None:
        self.n = problem.inputs.n
        self.points = points
        self.pred = torch.cat([x.reshape(-1) for x in points.tensors])
        self.mixing = ""
        try:
            self.owner = torch.cat([x.flatten() for x in owners(points.again, problem.inputs, self.n)])
        except SamplesMix as error:
            self.n, self.mixing = 1, str(error)
            self.owner = torch.zeros_like(self.pred, dtype=torch.long)
        self.point = self.pred.detach().requires_grad_()
        value = self.value(self.point)
        self.slope = torch.autograd.grad(value, self.point, create_graph=True)[0]  # of the loss, at the predictions

    def value(self, pred: Tensor) -> Tensor:
        """The objective as a function of the predictions."""
        shapes = [x.shape for x in self.points.tensors]
        parts = pred.split([shape.numel() for shape in shapes])
        return self.points.value([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

    def count(self, chosen: Sequence[int]) -> Tensor:
        """For each entry: how often its sample is among some, which may be named several times."""
        number = torch.tensor(list(chosen), dtype=torch.long, device=self.owner.device)
        return torch.bincount(number, minlength=self.n)[self.owner]

    def of_samples(self, chosen: Sequence[int], x: Tensor) -> Tensor:
        """A vector like the predictions, as often as each of its samples is chosen."""
        count = self.count(chosen)
        return torch.where(count > 0, x * count, torch.zeros_like(x))

    def by_sample(self, x: Tensor) -> Tensor:
        """`[E, P]` summed over the entries of each sample: `[E, N]`."""
        return x.new_zeros(len(x), self.n).index_add(1, self.owner, x)

    def loss_product(self, vector: Tensor) -> Tensor:
        """The Hessian of the loss at the predictions, times a vector."""
        return grads(self.slope, [self.point], vector)[0].detach()

    @cached_property
    def cotangent(self) -> Tensor:
        """What `J^T u` is differentiated with respect to, to get products with `J`."""
        return placeholder(self.pred)

    def forward(self, pulled: Tensor) -> Tensor:
        """The derivative of a number made from `J^T u` with respect to `u`: a product with `J`."""
        return grads(pulled, [self.cotangent])[0].detach()


def grads(
    output: Tensor, wrt: Sequence[Tensor], vector: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """The same as `gradients_of`, with zeros where nothing depends."""
    found = gradients_of(output, wrt, vector, create_graph)
    return [torch.zeros_like(in_parts(w)) if g is None else g for g, w in zip(found, wrt, strict=True)]
