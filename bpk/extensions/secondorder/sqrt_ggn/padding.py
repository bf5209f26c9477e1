"""The module extension of padding with zeros."""

from __future__ import annotations

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNZeroPad2d(SqrtGGNBaseModule):
    """For `nn.ZeroPad2d`."""

    layer = nn.ZeroPad2d
