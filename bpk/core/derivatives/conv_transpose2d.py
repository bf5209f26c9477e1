"""Derivatives of `nn.ConvTranspose2d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class ConvTranspose2DDerivatives(NamedDerivatives):
    layer = nn.ConvTranspose2d
