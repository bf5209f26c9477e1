"""The derivatives of a loss: its rule, with the arguments that BackPACK's users pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from bpk.core.derivatives.layers import Grads, LayerDerivatives, Samples, last_call
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.loss import Loss
from bpk.utils.subsampling import subsample


class LossDerivatives(LayerDerivatives):
    """The Hessian `H_n` of a loss with respect to the prediction for sample `n`, at the last forward pass.

    It includes the divisor of the reduction (of the full batch), and leaves out factors in front of the loss.

    >>> import torch, bpk
    >>> from bpk.core.derivatives import derivatives_for
    >>> loss_fn = bpk.extend(torch.nn.MSELoss(reduction="sum"))
    >>> loss = loss_fn(torch.zeros(3, 2, requires_grad=True), torch.ones(3, 2))
    >>> derivatives_for[loss_fn].sum_hessian(loss_fn)
    tensor([[6., 0.],
            [0., 6.]])
    """

    rule: Loss

    def sqrt_hessian(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, subsampling: Samples = None
    ) -> Tensor:
        """Columns `[K, N, *prediction]` with `H_n = sum_k s_kn s_kn^T`."""
        return subsample(self.rule.sqrt_hessian(self.call(module)), 1, subsampling)

    def sqrt_hessian_sampled(
        self,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mc_samples: int = 1,
        subsampling: Samples = None,
    ) -> Tensor:
        """Random columns `[M, N, *prediction]` whose outer products sum to `H_n` in expectation."""
        return subsample(self.rule.sqrt_hessian_sampled(self.call(module), mc_samples), 1, subsampling)

    def sum_hessian(self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None) -> Tensor:
        """`sum_n H_n` as a matrix over the flattened entries of one prediction."""
        return self.rule.sum_hessian(self.call(module))

    def make_hessian_mat_prod(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None
    ) -> Callable[[Tensor], Tensor]:
        """The function `mat -> H mat`, sample by sample: `[V, N, *prediction] -> [V, N, *prediction]`."""
        call = self.call(module)
        return lambda mat: self.rule.hessian_mat_prod(call, mat)

    def call(self, module: nn.Module) -> Call:
        """The call of the loss; refuses where its Hessian is not that of separate samples."""
        call = last_call(self.rule, module).call
        reason = self.rule.obstacle(call)
        if reason is not None:
            raise UnsupportedLayer(
                f"{type(module).__name__} has no Hessian by samples here.", f"{reason}.", "change the loss."
            )
        return call
