"""Module extensions of pooling layers."""

from __future__ import annotations

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNMaxPool1d(SqrtGGNBaseModule):
    """For `nn.MaxPool1d`."""

    layer = nn.MaxPool1d


class SqrtGGNMaxPool2d(SqrtGGNBaseModule):
    """For `nn.MaxPool2d`."""

    layer = nn.MaxPool2d


class SqrtGGNMaxPool3d(SqrtGGNBaseModule):
    """For `nn.MaxPool3d`."""

    layer = nn.MaxPool3d


class SqrtGGNAvgPool1d(SqrtGGNBaseModule):
    """For `nn.AvgPool1d`."""

    layer = nn.AvgPool1d


class SqrtGGNAvgPool2d(SqrtGGNBaseModule):
    """For `nn.AvgPool2d`."""

    layer = nn.AvgPool2d


class SqrtGGNAvgPool3d(SqrtGGNBaseModule):
    """For `nn.AvgPool3d`."""

    layer = nn.AvgPool3d
