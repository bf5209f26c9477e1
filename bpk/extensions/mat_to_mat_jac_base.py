"""Base class of module extensions whose quantity is multiplied with a layer's transposed Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bpk.core.derivatives.layers import LayerDerivatives
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.module_extension import GradTuple, ModuleExtension


class MatToJacMat(ModuleExtension):
    """Backpropagates columns `[V, N, *output]` (or several blocks of them) as `J^T` times the columns.

    Args:
        derivatives: Those of the layer, such as `derivatives_for[nn.ReLU]`.
        params: Names of the parameters, each with a method.
    """

    def __init__(self, derivatives: LayerDerivatives, params: Sequence[str] | None = None) -> None:
        super().__init__(params)
        self.derivatives = derivatives

    def backpropagate(
        self, ext: BackpropExtension, module: nn.Module, grad_inp: GradTuple, grad_out: GradTuple, bpQuantities: Any
    ) -> Any:
        if isinstance(bpQuantities, list):
            return [self.pulled(ext, module, grad_inp, grad_out, mat) for mat in bpQuantities]
        return self.pulled(ext, module, grad_inp, grad_out, bpQuantities)

    def pulled(
        self, ext: BackpropExtension, module: nn.Module, g_inp: GradTuple, g_out: GradTuple, mat: Tensor
    ) -> Tensor:
        """`J^T` times one block of columns."""
        return self.derivatives.jac_t_mat_prod(module, g_inp, g_out, mat, subsampling=ext.get_subsampling())
