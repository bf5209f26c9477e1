"""The fallback family: every product by `torch.func`, for any layer that mixes no samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from bpk.jacobians.call import Call, Wrt
from bpk.jacobians.rule import Residual, Rule


def as_function(rule: Rule, call: Call, wrts: Sequence[Wrt]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The layer as a function of `wrts` alone, and the point at which it was called."""

    def function(*args: Tensor) -> Tensor:
        inputs, params = list(call.inputs), dict(call.params)
        for wrt, arg in zip(wrts, args, strict=True):
            if isinstance(wrt, int):
                inputs[wrt] = arg
            else:
                params[wrt] = arg
        return rule.forward(call.options, inputs, params)

    point = tuple(call.inputs[w] if isinstance(w, int) else call.params[w] for w in wrts)
    return function, point


def of_one_sample(rule: Rule, call: Call, wrts: Sequence[Wrt], n: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Like `as_function` for sample `n` alone, without the batch axis in inputs and output."""
    one = call.subset([n])
    function, point = as_function(rule, one, wrts)

    def single(*args: Tensor) -> Tensor:
        lifted = [a[None] if isinstance(w, int) else a for w, a in zip(wrts, args, strict=True)]
        return function(*lifted)[0]

    return single, tuple(x[0] if isinstance(w, int) else x for w, x in zip(wrts, point, strict=True))


def residual_mat_prod(rule: Rule, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
    """Differentiate the transposed-Jacobian product once more, along each column of `mats`."""
    wrts = tuple(mats)
    function, point = as_function(rule, call, wrts)

    def gradient(*args: Tensor) -> tuple[Tensor, ...]:
        return vjp(function, *args)[1](grad_out)

    def along(*tangents: Tensor) -> tuple[Tensor, ...]:
        return jvp(gradient, point, tangents)[1]

    return dict(zip(wrts, vmap(along)(*mats.values()), strict=True))


def residual_columns(
    rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt]
) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Eigendecompose the dense residual of every sample, jointly over `wrts`."""
    vectors, signs = [], []
    for n in range(call.batch_size):
        dense, splits = _dense_residual(rule, call, grad_out, wrts, n)
        if not torch.isfinite(dense).all():  # NaN stays with its sample
            vectors.append(torch.full_like(dense, torch.nan))
            signs.append(torch.ones_like(dense[0]))
            continue
        wide = dense.double() if dense.dtype != torch.float64 else dense
        values, basis = torch.linalg.eigh((wide + wide.T) / 2)
        vectors.append((basis * values.abs().sqrt()).T.to(dense.dtype))
        signs.append(values.sign().to(dense.dtype))
    stacked = torch.stack(vectors, 1)  # [K, N, D]
    parts = stacked.split(splits, dim=2)
    columns: dict[Wrt, Tensor] = {}
    for wrt, part in zip(wrts, parts, strict=True):
        shape = call.shape_of(wrt)[1:] if isinstance(wrt, int) else call.shape_of(wrt)
        columns[wrt] = part.reshape(*part.shape[:2], *shape)
    return columns, torch.stack(signs, 1)


def _dense_residual(rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt], n: int) -> tuple[Tensor, list[int]]:
    """The residual of sample `n` as a matrix over the flattened, concatenated `wrts`."""
    one = call.subset([n])
    shapes = [call.shape_of(w)[1:] if isinstance(w, int) else call.shape_of(w) for w in wrts]
    splits = [s.numel() for s in shapes]
    eye = torch.eye(sum(splits), dtype=call.output.dtype, device=call.output.device)
    mats: dict[Wrt, Tensor] = {
        w: part.reshape(-1, 1, *s) if isinstance(w, int) else part.reshape(-1, *s)
        for w, s, part in zip(wrts, shapes, eye.split(splits, 1), strict=True)
    }
    product = rule.residual_mat_prod(one, grad_out[n : n + 1], mats)
    return torch.cat([product[w].flatten(1) for w in wrts], 1), splits


class Autodiff(Rule):
    """Any layer, with nothing declared: products by `torch.func` (slower than a rule, always right).

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
        function, point = as_function(self, call, (wrt,))
        return vmap(lambda tangent: jvp(function, point, (tangent,))[1])(mat)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, int) or sum_batch:
            function, point = as_function(self, call, (wrt,))
            pull = vjp(function, *point)[1]
            return vmap(lambda column: pull(column)[0])(mat)
        wrts: tuple[Wrt, ...] = (wrt,)

        def pull_sample(inputs: tuple[Tensor, ...], columns: Tensor) -> Tensor:
            lifted = Call(call.options, [x[None] for x in inputs], call.params, call.output[:1])
            function, point = as_function(self, lifted, wrts)
            pull = vjp(function, *point)[1]
            return vmap(lambda column: pull(column[None])[0])(columns)

        return vmap(pull_sample, in_dims=(0, 1), out_dims=1)(call.inputs, mat)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL
