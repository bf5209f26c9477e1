"""The fallback family: every product by autograd, for any layer that mixes no samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.rule import Residual, Rule
from bpk.jacobians.families.autodiff_graph import Graph, by_sample, is_differentiated
from bpk.jacobians.second_order import factoring, probing
from bpk.jacobians.second_order.bordered import corner

BLOCK = 1 << 22
"""How many numbers a block of columns holds at most."""


def as_function(rule: Rule, call: Call, wrts: Sequence[Wrt]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The layer as a function of `wrts` alone, and the point at which it was called."""

    def function(*args: Tensor) -> Tensor:
        inputs, params = list(call.inputs), dict(call.params)
        for wrt, arg in zip(wrts, args, strict=True):
            if isinstance(wrt, int):
                inputs[wrt] = arg
            else:
                params[wrt] = arg
        return rule.evaluate(call, inputs, params)

    point = tuple(call.inputs[w] if isinstance(w, int) else call.params[w] for w in wrts)
    return function, point


def residual_mat_prod(rule: Rule, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
    """Differentiate the transposed-Jacobian product once more, along each column of `mats`."""
    if not is_differentiated():
        with suppress(RuntimeError):  # not every backward pass can be differentiated
            return graph_of(rule, call).bend(grad_out, mats)
    wrts = tuple(mats)
    function, point = as_function(rule, call, wrts)

    def gradient(*args: Tensor) -> tuple[Tensor, ...]:
        return vjp(function, *args)[1](grad_out)

    def along(*tangents: Tensor) -> tuple[Tensor, ...]:
        return jvp(gradient, point, tangents)[1]

    return dict(zip(wrts, vmap(along)(*mats.values()), strict=True))


def graph_of(rule: Rule, call: Call, apart: bool = False) -> Graph:
    """The layer as autograd has recorded it, kept for further columns."""
    graph: Graph = call.memo(("graph", apart), lambda: Graph(rule, call, apart))
    return graph


def by_transforms(rule: Rule, call: Call, mat: Tensor, wrt: Wrt, apart: bool) -> Tensor:
    """`J^T M` as a function that can be differentiated itself."""
    if isinstance(wrt, str) and apart:
        copies = {name: p.expand(call.batch_size, *p.shape) for name, p in call.params.items()}
        pull = vjp(lambda own: by_sample(rule, call, {**copies, wrt: own}), copies[wrt])[1]
    else:
        function, point = as_function(rule, call, (wrt,))
        pull = vjp(function, *point)[1]
    return vmap(lambda column: pull(column)[0])(mat)


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

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if not is_differentiated():
            with suppress(RuntimeError):
                return graph_of(self, call).push(mat, wrt)
        function, point = as_function(self, call, (wrt,))
        return vmap(lambda tangent: jvp(function, point, (tangent,))[1])(mat)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        apart = isinstance(wrt, str) and not sum_batch
        if is_differentiated():
            return by_transforms(self, call, mat, wrt, apart)
        return graph_of(self, call, apart).pull(mat, wrt)

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        """A few columns at a time, in memory that is used again."""
        if is_differentiated() or not len(mat):
            return super().squared_sum(call, mat, param, weights, per_sample)
        step, total = max(1, BLOCK // 4 // max(1, call.batch_size * call.params[param].numel())), None
        for start in range(0, len(mat), step):
            here = slice(start, start + step)
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
        kind: Residual = call.memo(("residual", *wrts), lambda: probing.residual(self, call, wrts))
        return kind

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        ones = torch.ones_like(call.inputs[0])[None]
        return residual_mat_prod(self, call, grad_out, {0: ones})[0][0]

    def signed_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """No eigenvectors: small entries beside large ones keep their precision."""
        closed = any(isinstance(wrt, str) for wrt in wrts) and corner(self, call, wrts)
        if closed or self.residual(call, wrts) is not Residual.GENERAL:
            return super().signed_columns(call, grad_out, wrts)
        return factoring.residual_columns(self, call, grad_out, wrts, balanced=True)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`mean_n J_n^T M J_n`: by entries where `J_n` is diagonal, once where it is the same for all samples."""
        if is_differentiated():
            return super().congruence(call, matrix, wrt)
        slopes = probing.slopes(self, call) if wrt == 0 else None
        if slopes is not None:
            return matrix * (slopes.T @ slopes / len(slopes))
        if probing.same_for_all(self, call, wrt):
            return self._congruence_of_sample(call.subset([0]), matrix, wrt)
        size = max(len(matrix), call.sample_shape(wrt).numel())
        step = max(1, BLOCK // size**2)
        total: Tensor | None = None
        for start in range(0, call.batch_size, step):
            part = call.subset(range(start, min(start + step, call.batch_size)))
            found = self._congruence_of_samples(part, matrix, wrt)
            total = found if total is None else total + found
        assert total is not None
        return total / call.batch_size

    def _congruence_of_samples(self, call: Call, matrix: Tensor, wrt: Wrt) -> Tensor:
        """`sum_n J_n^T M J_n`, by multiplying from both sides."""
        n, out = call.batch_size, call.output.shape[1:]
        left = matrix.reshape(-1, 1, *out).expand(-1, n, *[-1] * len(out))
        half = self.jac_t_mat_prod(call, left, wrt, sum_batch=False).reshape(len(matrix), n, -1)  # (M J_n): [D, N, I]
        right = half.permute(2, 1, 0).reshape(-1, n, *out)
        return self.jac_t_mat_prod(call, right, wrt, sum_batch=False).reshape(len(right), n, -1).sum(1)
