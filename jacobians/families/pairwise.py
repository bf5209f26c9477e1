"""The family of functions of two numbers, applied entry by entry with broadcasting: products, quotients, maxima."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.broadcast import bind_operands, collect, spread
from bpk.jacobians.core.call import Call, Options, Wrt, once
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.products import Residual, add_up
from bpk.jacobians.core.series import Series
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.factoring import factor


@dataclass(frozen=True)
class Derivatives:
    """The derivatives of `f(x, y)` at every entry; numbers where they are constant."""

    x: Tensor
    y: Tensor
    xx: Tensor | float = 0.0
    xy: Tensor | float = 0.0
    yy: Tensor | float = 0.0

    def first(self, wrt: Wrt) -> Tensor:
        """`f_x` or `f_y`."""
        return self.y if wrt == 1 else self.x

    def second(self, a: Wrt, b: Wrt) -> Tensor | float:
        """`f_xx`, `f_xy` or `f_yy`."""
        return self.xy if a != b else (self.yy if a == 1 else self.xx)


class Broadcasting(Rule):
    """A function of several operands, entry by entry, which are broadcast behind the batch axis."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        return bind_operands(module, args, kwargs)

    def acts_on(self, call: Call) -> int | None:
        return 0 if len({x.shape for x in call.inputs}) == 1 else None

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        shape = torch.broadcast_shapes(*(x.shape[1:] for x in inputs))
        return options.forward(*(spread(x, shape) for x in inputs))


class Pairwise(Broadcasting):
    """`out = f(x, y)` entry by entry: the author gives `f`'s derivatives as a function of `x` and `y`.

    Products with the transposed Jacobian sum over what was repeated.
    """

    def __init__(
        self,
        *modules: type[nn.Module],
        derivatives: Callable[[Tensor, Tensor], Derivatives],
        functions: Collection[Any] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, functions=functions, examples=examples)
        self.derivatives = derivatives

    @once
    def _at(self, call: Call) -> Derivatives:
        x, y = (spread(x, call.output.shape[1:]) for x in call.inputs)
        return self.derivatives(x, y)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return spread(mat, call.output.shape[1:], 2) * self._at(call).first(wrt)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return collect(mat * self._at(call).first(wrt), call.sample_shape(wrt), 2)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        at = self._at(call)
        if not any(isinstance(at.second(a, b), Tensor) or at.second(a, b) for a in wrts for b in wrts):
            return Residual.ZERO
        return Residual.GENERAL

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """By Leibniz where the function is `x y`, up to what is linear in `x` and `y`."""
        at, out = self._at(call), call.output.shape[1:]
        mixed = [second for second in (at.xx, at.yy, at.xy) if not isinstance(second, Tensor)]
        if mixed != [0.0, 0.0, 1.0] or len(series) < 2:
            return super().taylor(call, series)
        x, y = (series[i].linear(at.first(1 - i), lambda c: spread(c, out, 2)) for i in (0, 1))
        return x.product(y, call.output, torch.mul)

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """`(R u)_a = sum_b f_ab g u_b`."""
        at, out = self._at(call), call.output.shape[1:]
        wide = {wrt: spread(mat, out, 2) for wrt, mat in mats.items()}
        products: dict[Wrt, Tensor] = {}
        for a in mats:
            total = add_up([grad_out * at.second(a, b) * wide[b] for b in mats])
            products[a] = collect(total, call.sample_shape(a), 2)
        return products

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """From the eigenvectors of `g [[f_xx, f_xy], [f_xy, f_yy]]` at every entry of the output."""
        at, out = self._at(call), call.output.shape[1:]
        rows = [torch.stack([as_rows(grad_out * at.second(a, b)) for b in wrts], -1) for a in wrts]
        vectors, signs = factor(torch.stack(rows, -2).double().flatten(0, 1))  # [K, N D, wrts], [K, N D]
        n, columns = len(grad_out), dict[Wrt, Tensor]()
        for k, wrt in enumerate(wrts):
            placed = torch.diag_embed(vectors[:, :, k].unflatten(1, (n, -1)))  # [K, N, D, D (column)]
            wide = placed.permute(0, 3, 1, 2).reshape(-1, n, *out).to(grad_out.dtype)
            columns[wrt] = collect(wide, call.sample_shape(wrt), 2)
        return columns, signs.unflatten(1, (n, -1)).transpose(1, 2).flatten(0, 1).to(grad_out.dtype)
