"""The module extension of flattening."""

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import made_for

(SqrtGGNFlatten,) = made_for(__name__, nn.Flatten)
