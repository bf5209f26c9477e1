"""Derivatives of `nn.BatchNorm1d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class BatchNormNdDerivatives(NamedDerivatives):
    layer = nn.BatchNorm1d
