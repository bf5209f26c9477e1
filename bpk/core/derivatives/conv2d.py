"""Derivatives of `nn.Conv2d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class Conv2DDerivatives(NamedDerivatives):
    layer = nn.Conv2d
