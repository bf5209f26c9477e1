"""The base class of derivatives, under the names that clients of BackPACK import."""

from bpk.core.derivatives.layers import LayerDerivatives as BaseDerivatives
from bpk.core.derivatives.layers import LayerDerivatives as BaseParameterDerivatives
from bpk.core.derivatives.losses import LossDerivatives as BaseLossDerivatives

__all__ = ["BaseDerivatives", "BaseLossDerivatives", "BaseParameterDerivatives"]
