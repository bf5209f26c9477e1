"""Derivatives of a linear layer, under the name that clients of BackPACK import."""

from __future__ import annotations

import torch
from torch import nn

from bpk.core.derivatives.named import NamedDerivatives


class LinearDerivatives(NamedDerivatives):
    """Of `nn.Linear`."""

    layer = nn.Linear

    @staticmethod
    def _get_additional_dims(module: nn.Linear) -> torch.Size:
        """The axes of the input between batch and features (ViViT asks for them)."""
        given = vars(module)["input0"]
        return torch.Size(given.shape[1:-1])
