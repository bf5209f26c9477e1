"""Derivatives of batch normalisation, under the name that clients of BackPACK import."""

from __future__ import annotations

from torch import nn

from bpk.core.derivatives.named import NamedDerivatives


class BatchNormNdDerivatives(NamedDerivatives):
    """Of `nn.BatchNorm1d`."""

    layer = nn.BatchNorm1d
