"""Derivatives of a transposed convolution, under the name that clients of BackPACK import."""

from __future__ import annotations

from torch import nn

from bpk.core.derivatives.named import NamedDerivatives


class ConvTranspose1DDerivatives(NamedDerivatives):
    """Of `nn.ConvTranspose1d`."""

    layer = nn.ConvTranspose1d
