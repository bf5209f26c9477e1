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
        return rule.evaluate(call, inputs, params)

    point = tuple(call.inputs[w] if isinstance(w, int) else call.params[w] for w in wrts)
    return function, point


def residual_mat_prod(rule: Rule, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
    """Differentiate the transposed-Jacobian product once more, along each column of `mats`."""
    wrts = tuple(mats)
    function, point = as_function(rule, call, wrts)

    def gradient(*args: Tensor) -> tuple[Tensor, ...]:
        return vjp(function, *args)[1](grad_out)

    def along(*tangents: Tensor) -> tuple[Tensor, ...]:
        return jvp(gradient, point, tangents)[1]

    return dict(zip(wrts, vmap(along)(*mats.values()), strict=True))


def factor(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecompose symmetric matrices `[N, D, D]` into columns `[K, N, D]` and signs `[K, N]`.

    A matrix with NaN or infinite entries gives NaN columns, and leaves the other samples alone.
    """
    wide = (dense + dense.transpose(1, 2)) / 2
    wide = wide.float() if dense.dtype in (torch.bfloat16, torch.float16) else wide
    healthy = torch.isfinite(wide).flatten(1).all(1)
    values, basis = torch.linalg.eigh(torch.where(healthy[:, None, None], wide, torch.zeros_like(wide)))
    columns = (basis * values.abs().sqrt()[:, None, :]).permute(2, 0, 1)
    columns = torch.where(healthy[None, :, None], columns, torch.full_like(columns, torch.nan))
    return columns.to(dense.dtype), values.sign().T.to(dense.dtype)


def residual_columns(rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt]) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Eigendecompose the dense residual of every sample, jointly over `wrts`."""
    dense = [_dense_residual(rule, call, grad_out, wrts, n) for n in range(call.batch_size)]
    vectors, signs = factor(torch.stack(dense))
    shapes = [call.shape_of(w)[1:] if isinstance(w, int) else call.shape_of(w) for w in wrts]
    parts = vectors.split([s.numel() for s in shapes], dim=2)
    columns = {w: part.reshape(*part.shape[:2], *s) for w, s, part in zip(wrts, shapes, parts, strict=True)}
    return columns, signs


def _dense_residual(rule: Rule, call: Call, grad_out: Tensor, wrts: Sequence[Wrt], n: int) -> Tensor:
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
    return torch.cat([product[w].reshape(len(eye), -1) for w in wrts], 1)


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

        def pull_sample(inputs: tuple[Tensor, ...], column: Tensor) -> Tensor:
            lifted = Call(call.options, [x[None] for x in inputs], call.params, call.output[:1], used=call.used)
            function, point = as_function(self, lifted, wrts)
            return vjp(function, *point)[1](column[None])[0]

        # one column after the other: torch's batching rules of some layers (PReLU) fail under a second vmap
        pull = vmap(pull_sample)
        rows = [pull(call.inputs, column) for column in mat]
        return torch.stack(rows) if rows else mat.new_zeros(0, *mat.shape[1:2], *call.params[wrt].shape)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL
