"""The fallback family: every product by autograd, for any layer that mixes no samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from bpk.jacobians.core.again import call_again
from bpk.jacobians.core.binding import Binding, WithArguments
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.numeric import is_differentiated, slices
from bpk.jacobians.core.products import Residual, add_up
from bpk.jacobians.core.series import Series
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order import structure
from bpk.jacobians.second_order.bordered import corner
from bpk.jacobians.second_order.factoring import residual_columns
from bpk.jacobians.second_order.graph import as_function, by_transforms, graph_of, residual_product
from bpk.jacobians.second_order.taylor import by_nesting

INPUT = object()
"""Stands for an input among the arguments of a call."""

BLOCK = 1 << 22
"""How many numbers a block of columns holds at most."""


class Autodiff(Rule):
    """Any layer, with nothing declared: products by `torch.func` (slower than a rule, always right).

    The structure of its derivatives (zero, diagonal, the same for all samples) is found by probing.

    >>> import torch
    >>> from torch import nn
    >>> class Swish(nn.Module):
    ...     def forward(self, x):
    ...         return x * x.sigmoid()
    >>> rule = Autodiff(Swish)
    >>> call = Call.of(Swish(), torch.zeros(1, 2))
    >>> rule.jac_t_mat_prod(call, torch.ones(1, 1, 2))
    tensor([[[0.5000, 0.5000]]])
    """

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        """Tensors are inputs; numbers and the like are kept with their places, because the layer is called again."""
        if not kwargs and all(isinstance(x, Tensor) for x in args):
            return super().bind(module, args, kwargs)
        given = dict(enumerate(args)) | dict(kwargs)
        inputs = tuple([x for x in given.values() if isinstance(x, Tensor)])
        if len(tensors_in(list(given.values()))) > len(inputs):
            return Binding(module, ())  # autograd, to which the call is left, looks inside of all arguments
        places = {key: INPUT if isinstance(x, Tensor) else x for key, x in given.items()}
        return Binding(WithArguments(module, places), inputs)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        if not isinstance(options, WithArguments):
            return super().forward(options, inputs, params)
        left = iter(inputs)
        given = {key: next(left) if x is INPUT else x for key, x in options.arguments.items()}
        args = tuple([x for key, x in given.items() if isinstance(key, int)])
        out = call_again(options.module, params, args, {k: x for k, x in given.items() if isinstance(k, str)})
        return out if isinstance(out, Tensor) else out[0]

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if not is_differentiated():
            with suppress(RuntimeError):
                return graph_of(self, call).push(mat, wrt)
        function, point = as_function(self, call, (wrt,))
        return vmap(lambda tangent: jvp(function, tuple(point), (tangent,))[1])(mat)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        per_sample = isinstance(wrt, str) and not sum_batch
        if is_differentiated():
            return by_transforms(self, call, mat, wrt, per_sample)
        return graph_of(self, call, per_sample).pull(mat, wrt)

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        """A few columns at a time, in memory that is used again."""
        if is_differentiated() or not len(mat):
            return super().squared_sum(call, mat, param, weights, per_sample)
        step, total = max(1, BLOCK // 4 // max(1, call.batch_size * call.params[param].numel())), None
        for here in slices(len(mat), step):
            rows = self.jac_t_mat_prod(call, mat[here], param, sum_batch=False)
            order = sorted(range(2, rows.dim()), key=rows.stride, reverse=True)  # as they are in memory
            squares = rows.permute(0, 1, *order).square()
            if weights is not None:
                squares *= weights[here].reshape(squares.shape[:2] + (1,) * len(order))
            found = squares.sum(0) if per_sample else squares.flatten(0, 1).sum(0)
            lead = found.dim() - len(order)  # each block lies in memory in its own way
            found = found.permute([*range(lead), *(lead + order.index(axis) for axis in range(2, rows.dim()))])
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        if is_differentiated():
            return Residual.GENERAL
        return call.memo(("residual", *wrts), lambda: structure.residual(self, call, wrts))

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """By derivatives along the curves: what probing finds of the second derivative says nothing of the third."""
        return by_nesting(self, call, series)

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        ones = torch.ones_like(call.inputs[0])[None]
        return residual_product(self, call, grad_out, (0,))({0: ones})[0][0]

    def signed_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """No eigenvectors: small entries beside large ones keep their precision."""
        closed = any(isinstance(wrt, str) for wrt in wrts) and corner(self, call, wrts)
        if closed or is_differentiated() or self.residual(call, wrts) is not Residual.GENERAL:
            return super().signed_columns(call, grad_out, wrts)
        return residual_columns(self, call, grad_out, wrts, balanced=True)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`mean_n J_n^T M J_n`: by entries where `J_n` is diagonal, once where it is the same for all samples."""
        if is_differentiated():
            return super().congruence(call, matrix, wrt)
        slopes = structure.slopes(self, call) if wrt == 0 else None
        if slopes is not None:
            return matrix * (slopes.T @ slopes / len(slopes))
        if structure.same_for_all(self, call, wrt):
            return self._congruence_of_samples(call.subset([0]), matrix, wrt)
        size = max(len(matrix), call.sample_shape(wrt).numel())
        step = max(1, BLOCK // size**2)
        parts = (call.subset(range(here.start, here.stop)) for here in slices(call.batch_size, step))
        return add_up(self._congruence_of_samples(part, matrix, wrt) for part in parts) / call.batch_size
