"""The gradient of a loss at one point, kept so that autograd can differentiate it once more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.graph import products, rounds_to_single
from bpk.jacobians.second_order.probing import draw, precision


@dataclass(frozen=True)
class Linearised:
    """A loss at a point `[N, *pred]`: its value, and its gradient with the graph that leads to the point.

    Plain autograd rather than `torch.func`: it takes every loss that can be differentiated twice, also one that asks
    for values, or has an `autograd.Function` of its own.
    """

    point: Tensor
    value: Tensor
    gradient: Tensor
    differentiable: bool
    """Whether products are functions of the inputs of the call for autograd."""

    @classmethod
    def of(cls, rule: Rule, call: Call, wrt: int = 0) -> Linearised:
        """Evaluate a loss, and its derivative by one of its inputs, at a call."""
        live = torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs)
        inputs = [wide(x) if live else wide(x.detach()) for x in call.inputs]
        with torch.enable_grad():
            x = inputs[wrt]
            # no leaf: hooks on all modules (FlopCounterMode) ask whether the engine reaches what these are given
            point = (x if live and x.requires_grad else x.detach().requires_grad_()).view_as(x)
            value = rule.forward(call.options, (*inputs[:wrt], point, *inputs[wrt + 1 :]), call.params)
            if not value.requires_grad:
                return cls(point, value, torch.zeros_like(point), live)
            (found,) = torch.autograd.grad(value, point, create_graph=True, allow_unused=True)
        return cls(point, value, torch.zeros_like(point) if found is None else found, live)

    def product(self, mat: Tensor) -> Tensor:
        """The Hessian times columns `[V, N, *pred]`."""
        if not self.gradient.requires_grad or not len(mat):
            return torch.zeros_like(mat)
        further = self.differentiable and torch.is_grad_enabled()
        (found,) = products((self.gradient,), (self.point,), (mat,), further)
        return torch.zeros_like(mat) if found is None else found.to(mat.dtype)

    def flat_product(self, mat: Tensor) -> Tensor:
        """The same for columns `[V, N, D]`."""
        return self.product(mat.reshape(len(mat), *self.point.shape)).reshape(mat.shape)

    @cached_property
    def eps(self) -> float:
        """The relative rounding error of a product: that of the shortest format that the loss computes in."""
        with torch.no_grad():
            found = self.product(draw((1, *self.point.shape), self.point, 0))
        found = found[found.isfinite() & (found != 0)]
        eps = torch.finfo(precision(found) if len(found) else self.point.dtype).eps
        return max(eps, torch.finfo(torch.float32).eps) if self.is_partly_single else eps

    @property
    def is_partly_single(self) -> bool:
        """Whether a term is computed in float32, which the sum does not show if others are not."""
        node, start = self.value.grad_fn, self.point.grad_fn
        return node is not None and rounds_to_single(node, lambda here: here is start)

    @property
    def floor(self) -> float:
        """What rounding may make of a zero second derivative, given the gradient."""
        finite = [x.detach()[x.isfinite()].abs() for x in (self.gradient, self.point)]
        steep, far = (float(x.max()) if len(x) else 0.0 for x in finite)
        return 32 * torch.finfo(torch.float64).eps * steep / max(1.0, far)
