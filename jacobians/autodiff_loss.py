"""The fallback family of losses: Hessians by `torch.func`, for any loss that treats its samples separately."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from bpk.jacobians.call import Call
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.jacobians.loss import Loss, as_rows


class AutodiffLoss(Loss):
    """A loss with nothing declared: per-sample Hessians by `torch.func`, their factors by eigendecomposition.

    The loss must treat its samples separately (checked) and, for what needs a square root, be convex in its
    prediction (checked). Factors have `D` columns. Their derivatives are those of an eigendecomposition, undefined
    where eigenvalues coincide; those of `hessian_mat_prod` and `sum_hessian` always exist.

    >>> import torch
    >>> from torch import nn
    >>> class LogCosh(nn.Module):
    ...     def forward(self, prediction, target):
    ...         return (prediction - target).cosh().log().sum()
    >>> call = Call.of(LogCosh(), torch.zeros(1, 2), torch.zeros(1, 2))
    >>> AutodiffLoss(LogCosh).sum_hessian(call)
    tensor([[1., 0.],
            [0., 1.]])
    """

    def sqrt_hessian(self, call: Call) -> Tensor:
        columns, signs = self.hessian_columns(call)
        if (signs < 0).any():
            raise UnsupportedLayer(
                explain(
                    f"The Hessian of {type(call.options).__name__} has no square root.",
                    "the loss is not convex in its prediction, so the GGN is not positive semi-definite.",
                    "use the quantities of the exact Hessian, such as DiagHessian or HMP.",
                )
            )
        return columns

    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        dense = self._dense(call)
        finite = dense.isfinite().all(2, keepdim=True).all(1, keepdim=True)
        values, basis = torch.linalg.eigh(torch.where(finite, dense, 0.0).double())
        # Rounding turns zero eigenvalues into tiny ones of either sign.
        noise = torch.finfo(dense.dtype).eps * dense.shape[1] * values.abs().amax(1, keepdim=True)
        values = torch.where(values.abs() <= noise, 0.0, values)
        columns = (basis * values.abs().sqrt()[:, None, :]).permute(2, 0, 1)
        columns = torch.where(finite[:, 0], columns, torch.nan)  # NaN stays with its sample
        x = call.inputs[0]
        return columns.reshape(-1, *x.shape).to(x.dtype), values.sign().T.to(x.dtype)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return self.forward(call.options, (x, *call.inputs[1:]), call.params)

        pull = vjp(grad(loss), call.inputs[0])[1]  # the Hessian is symmetric; more losses allow this than jvp

        def times_hessian(column: Tensor) -> Tensor:
            return pull(column)[0]

        return vmap(times_hessian)(mat)

    def sum_hessian(self, call: Call) -> Tensor:
        return self._dense(call).sum(0)

    def obstacle(self, call: Call) -> str | None:
        return super().obstacle(call) or (None if self._separates(call) else "it couples the samples of a batch")

    def _dense(self, call: Call) -> Tensor:
        """Every sample's Hessian `[N, D, D]`, symmetric."""
        x = call.inputs[0]
        size = x.shape[1:].numel()
        eye = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *x.shape[1:])
        product = self.hessian_mat_prod(call, eye.expand(size, *x.shape))
        dense = product.reshape(size, x.shape[0], size).transpose(0, 1)
        return (dense + dense.mT) / 2

    def _separates(self, call: Call) -> bool:
        """Whether scaling each sample of a vector differently scales the Hessian's product in the same way."""
        x = call.inputs[0].detach()
        generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
        probe = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        factor = torch.randn(x.shape[0], generator=generator, dtype=torch.float64).to(x)
        factor = factor.reshape(-1, *[1] * (x.dim() - 1))
        with torch.no_grad():
            plain, scaled = self.hessian_mat_prod(call, torch.stack([probe, factor * probe]))
        expected, found = as_rows(factor * plain), as_rows(scaled)
        size = expected.abs().sum(1, keepdim=True) + found.abs().sum(1, keepdim=True)
        agree = (found - expected).abs() <= torch.finfo(x.dtype).eps ** 0.5 * size
        return bool((agree | expected.isnan()).all())
