"""The diagonal of a stretch's second derivative in a parameter that it uses directly, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
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

    The gradient at the end of the stretch is `[R, ...]`; the parameter is known by its number.
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

        def product(mats: Sequence[Tensor]) -> list[Tensor]:
            return [products.product([mats[0][:, 0]])[0][:, None]]

        blocks = Couplings(product, [torch.Size([1, *param.shape])], param).blocks()
        (size,), found = blocks.sizes, []
        for some in torch.arange(size, device=param.device).split(max(1, AT_ONCE // max(1, param.numel()))):
            units = param.new_zeros(len(some), size).scatter_(1, some[:, None], 1.0)
            everywhere = blocks.from_blocks(0, units[:, None, None].expand(-1, 1, blocks.positions, -1))
            rows = blocks.to_blocks(0, product([everywhere])[0])  # [K, 1, P, B]
            found.append(rows.gather(3, some[:, None, None, None].expand(-1, 1, blocks.positions, 1)))
        return blocks.from_blocks(0, torch.cat(found).permute(3, 1, 2, 0))[0, 0]
