"""Derivatives of `nn.Linear`, under the name that clients of BackPACK import."""

import torch
from torch import nn

from bpk.core.derivatives.table import NamedDerivatives


class LinearDerivatives(NamedDerivatives):
    layer = nn.Linear

    @staticmethod
    def _get_additional_dims(module: nn.Linear) -> torch.Size:
        """The axes of the input between batch and features (ViViT asks for them)."""
        return torch.Size(vars(module)["input0"].shape[1:-1])
