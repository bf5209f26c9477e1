"""Derivatives of `nn.ConvTranspose3d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class ConvTranspose3DDerivatives(NamedDerivatives):
    layer = nn.ConvTranspose3d
