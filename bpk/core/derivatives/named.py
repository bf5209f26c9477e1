"""Derivatives by class of layer, created without arguments as in BackPACK."""

from __future__ import annotations

from torch import nn

from bpk.core.derivatives.layers import LayerDerivatives
from bpk.core.derivatives.table import derivatives_for


class NamedDerivatives(LayerDerivatives):
    """The derivatives of a class of layers."""

    layer: type[nn.Module]
    """That class."""

    def __init__(self) -> None:
        super().__init__(derivatives_for[self.layer].rule)
