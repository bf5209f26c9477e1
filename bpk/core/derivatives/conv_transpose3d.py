"""Derivatives of a transposed convolution, under the name that clients of BackPACK import."""

from __future__ import annotations

from torch import nn

from bpk.core.derivatives.named import NamedDerivatives


class ConvTranspose3DDerivatives(NamedDerivatives):
    """Of `nn.ConvTranspose3d`."""

    layer = nn.ConvTranspose3d
