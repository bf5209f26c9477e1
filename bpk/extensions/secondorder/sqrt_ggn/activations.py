"""Module extensions of activation layers."""

from __future__ import annotations

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNReLU(SqrtGGNBaseModule):
    """For `nn.ReLU`."""

    layer = nn.ReLU


class SqrtGGNSigmoid(SqrtGGNBaseModule):
    """For `nn.Sigmoid`."""

    layer = nn.Sigmoid


class SqrtGGNTanh(SqrtGGNBaseModule):
    """For `nn.Tanh`."""

    layer = nn.Tanh


class SqrtGGNELU(SqrtGGNBaseModule):
    """For `nn.ELU`."""

    layer = nn.ELU


class SqrtGGNSELU(SqrtGGNBaseModule):
    """For `nn.SELU`."""

    layer = nn.SELU


class SqrtGGNLeakyReLU(SqrtGGNBaseModule):
    """For `nn.LeakyReLU`."""

    layer = nn.LeakyReLU


class SqrtGGNLogSigmoid(SqrtGGNBaseModule):
    """For `nn.LogSigmoid`."""

    layer = nn.LogSigmoid
