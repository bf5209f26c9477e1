"""Derivatives of `nn.Conv3d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class Conv3DDerivatives(NamedDerivatives):
    layer = nn.Conv3d
