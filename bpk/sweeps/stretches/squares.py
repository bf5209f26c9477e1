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
        """The diagonal `[*p]` of a matrix, from a product for each entry of its largest block.

        Blocks are those of axes of the parameter along which no entries are coupled: the rows of a normalised weight.
        """
        products.require_values_only()
        param = in_parts(self.source.trained[0].detach())
        size = param.numel()
        found = Couplings(products.product, [param.shape], param)
        if size == 1 or found.none_between([torch.arange(size, device=param.device).reshape(param.shape)], size):
            return products.product([torch.ones_like(param)[None]])[0][0]
        apart = [axis for axis in range(param.dim()) if self.separates(found, param, axis)]
        within = [axis for axis in range(param.dim()) if axis not in apart]
        order = [*apart, *within]
        blocks, inside = (torch.Size([param.shape[axis] for axis in axes]) for axes in (apart, within))
        back = [1 + order.index(axis) for axis in range(param.dim())]
        diagonal = param.new_empty(blocks.numel(), inside.numel())
        for some in torch.arange(inside.numel(), device=param.device).split(max(1, AT_ONCE // size)):
            units = param.new_zeros(len(some), inside.numel()).scatter_(1, some[:, None], 1.0)
            units = units[:, None].expand(-1, blocks.numel(), -1).reshape(len(some), *blocks, *inside)
            rows = products.product([units.permute(0, *back)])[0].permute(0, *(1 + axis for axis in order))
            every = rows.reshape(len(some), blocks.numel(), inside.numel())
            diagonal[:, some] = every.gather(2, some[:, None, None].expand(-1, blocks.numel(), 1))[..., 0].T
        return diagonal.reshape(*blocks, *inside).permute([axis - 1 for axis in back])

    def separates(self, found: Couplings, param: Tensor, axis: int) -> bool:
        """Whether entries with different positions along an axis are not coupled."""
        count = param.shape[axis]
        label = torch.arange(count, device=param.device).reshape(-1, *[1] * (param.dim() - axis - 1))
        return count > 1 and found.none_between([label.expand(param.shape)], count)
