"""The diagonal of a stretch's second derivative in a parameter that it uses directly, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bpk.jacobians.second_order.structure import Couplings
from bpk.plan.graph import Source
from bpk.plan.parts import in_parts
from bpk.sweeps.stretches.no_second_derivative import differentiable_twice
from bpk.sweeps.stretches.products import StretchProducts

AT_ONCE = 1 << 22
"""How many numbers products with unit vectors hold at a time, about."""


class ParameterCurvature:
    """`d2 <grad, stretch> / dp2` for one parameter.

    Args:
        source: The stretch.
        grad: The gradient at its end `[R, ...]`.
        number: Which of its parameters.
    """

    def __init__(self, source: Source, grad: Tensor, number: int) -> None:
        self.source = replace(source, targets=(), trained=(source.trained[number],))
        self.grad = grad

    def products(self, row: int | None = None) -> StretchProducts:
        """Products with it, as a sum over rows, or of one row."""
        grad = self.grad
        if row is not None:
            grad = torch.zeros_like(grad)
            grad[row] = self.grad[row]
        return StretchProducts(self.source, grad)

    @property
    def is_zero(self) -> bool:
        """Whether the stretch is linear in the parameter."""
        with differentiable_twice(self.source, self.grad):
            return self.products().is_zero

    def diagonal(self, by_row: bool) -> Tensor:
        """`[R, *p]`, or their sum `[*p]`."""
        with differentiable_twice(self.source, self.grad):
            if not by_row:
                return self.diagonal_of(self.products())
            return torch.stack([self.diagonal_of(self.products(n)) for n in range(len(self.grad))])

    def diagonal_of(self, products: StretchProducts) -> Tensor:
        """The diagonal `[*p]` of a matrix, from one product if it is one, or else from one for each entry."""
        products.require_values_only()
        param = in_parts(self.source.trained[0].detach())
        size = param.numel()
        entries = torch.arange(size, device=param.device)
        found = Couplings(products.product, [param.shape], param)
        if size == 1 or found.none_between([entries.reshape(param.shape)], size):
            return products.product([torch.ones_like(param)[None]])[0][0]
        parts = []
        for some in entries.split(max(1, AT_ONCE // size)):
            units = param.new_zeros(len(some), size).scatter_(1, some[:, None], 1.0)
            rows = products.product([units.reshape(-1, *param.shape)])[0].flatten(1)
            parts.append(rows.gather(1, some[:, None])[:, 0])
        return torch.cat(parts).reshape(param.shape)
