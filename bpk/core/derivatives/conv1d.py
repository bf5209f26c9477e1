"""Derivatives of `nn.Conv1d`, under the name that clients of BackPACK import."""

from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class Conv1DDerivatives(NamedDerivatives):
    layer = nn.Conv1d
