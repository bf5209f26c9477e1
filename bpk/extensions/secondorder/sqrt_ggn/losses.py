"""Module extensions of losses: where a square root of the GGN begins."""

from __future__ import annotations

from typing import Any

from torch import nn

from bpk.core.derivatives import derivatives_for
from bpk.core.derivatives.losses import LossDerivatives
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.module_extension import GradTuple
from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule, made_for
from bpk.extensions.secondorder.strategies import LossHessianStrategy


class SqrtGGNBaseLossModule(SqrtGGNBaseModule):
    """A square root of the loss Hessian, exact or sampled as `ext.loss_hessian_strategy` says."""

    def backpropagate(
        self, ext: BackpropExtension, module: nn.Module, grad_inp: GradTuple, grad_out: GradTuple, bpQuantities: Any
    ) -> Any:
        derivatives, options = derivatives_for[module], vars(ext)
        assert isinstance(derivatives, LossDerivatives)
        some = ext.get_subsampling()
        factor = grad_out[0] if grad_out and grad_out[0] is not None else 1.0
        if options.get("loss_hessian_strategy", LossHessianStrategy.EXACT) is LossHessianStrategy.EXACT:
            return derivatives.sqrt_hessian(module, grad_inp, grad_out, subsampling=some) * factor**0.5
        drawn = ext.get_num_mc_samples()
        assert drawn is not None  # extensions that sample say how often
        return derivatives.sqrt_hessian_sampled(module, grad_inp, grad_out, drawn, subsampling=some) * factor**0.5


class SqrtGGNBCEWithLogithsLoss(SqrtGGNBaseLossModule):
    """For `nn.BCEWithLogitsLoss` (spelled as in BackPACK)."""

    layer = nn.BCEWithLogitsLoss


SqrtGGNMSELoss, SqrtGGNCrossEntropyLoss = made_for(
    __name__, nn.MSELoss, nn.CrossEntropyLoss, base=SqrtGGNBaseLossModule
)
