"""Derivatives of a convolution, under the name that clients of BackPACK import."""

from __future__ import annotations

from torch import nn

from bpk.core.derivatives.named import NamedDerivatives


class Conv2DDerivatives(NamedDerivatives):
    """Of `nn.Conv2d`."""

    layer = nn.Conv2d
