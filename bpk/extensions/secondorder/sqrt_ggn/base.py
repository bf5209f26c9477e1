"""Module extensions that carry a square root of the GGN through a layer, for extensions that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from bpk.core.derivatives import LayerDerivatives, derivatives_for
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.mat_to_mat_jac_base import MatToJacMat
from bpk.extensions.module_extension import GradTuple


class SqrtGGNBaseModule(MatToJacMat):
    """Common part: columns are multiplied with the transposed Jacobian that the rule of the layer gives."""

    layer: type[nn.Module]
    """The class of layers that a subclass is for."""

    def __init__(self, derivatives: LayerDerivatives | None = None, params: Sequence[str] | None = None) -> None:
        super().__init__(derivatives_for[self.layer] if derivatives is None else derivatives, params)

    def pulled(
        self, ext: BackpropExtension, module: nn.Module, g_inp: GradTuple, g_out: GradTuple, mat: Tensor
    ) -> Tensor:
        return derivatives_for[module].jac_t_mat_prod(module, g_inp, g_out, mat, subsampling=ext.get_subsampling())


def made_for(
    file: str, *layers: type[nn.Module], base: type[SqrtGGNBaseModule] = SqrtGGNBaseModule
) -> Iterator[type[SqrtGGNBaseModule]]:
    """Of each class of layers: `class SqrtGGN<Layer>` of a file, which BackPACK has under this name."""
    for layer in layers:
        yield type(
            f"SqrtGGN{layer.__name__}",
            (base,),
            {"layer": layer, "__module__": file, "__doc__": f"For `{layer.__name__}`."},
        )
