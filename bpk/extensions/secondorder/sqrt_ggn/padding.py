"""The module extension of padding with zeros."""

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import made_for

(SqrtGGNZeroPad2d,) = made_for(__name__, nn.ZeroPad2d)
