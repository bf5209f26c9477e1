"""Derivatives of a transposed convolution, under the name that clients of BackPACK import."""

from __future__ import annotations

from torch import nn

from bpk.core.derivatives.named import NamedDerivatives


class ConvTranspose2DDerivatives(NamedDerivatives):
    """Of `nn.ConvTranspose2d`."""

    layer = nn.ConvTranspose2d
