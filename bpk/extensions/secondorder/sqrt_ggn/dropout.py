"""The module extension of dropout."""

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import made_for

(SqrtGGNDropout,) = made_for(__name__, nn.Dropout)
