"""Derivatives of `nn.ConvTranspose1d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class ConvTranspose1DDerivatives(NamedDerivatives):
    layer = nn.ConvTranspose1d
