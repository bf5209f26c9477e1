"""The module extension of flattening."""

from __future__ import annotations

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNFlatten(SqrtGGNBaseModule):
    """For `nn.Flatten`."""

    layer = nn.Flatten
