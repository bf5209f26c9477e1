"""Module extensions of pooling layers."""

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import made_for

SqrtGGNMaxPool1d, SqrtGGNMaxPool2d, SqrtGGNMaxPool3d = made_for(__name__, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
SqrtGGNAvgPool1d, SqrtGGNAvgPool2d, SqrtGGNAvgPool3d = made_for(__name__, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
