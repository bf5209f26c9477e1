"""The module extension of dropout."""

from __future__ import annotations

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNDropout(SqrtGGNBaseModule):
    """For `nn.Dropout`."""

    layer = nn.Dropout
