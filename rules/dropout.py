"""Dropout layers: every entry is multiplied by a random number in training mode and left alone otherwise."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bpk.jacobians.core.example import case
from bpk.jacobians.families.linear_map import RandomScale

LAYERS = (
    (nn.Dropout, F.dropout, (3, 5)),
    (nn.Dropout1d, F.dropout1d, (3, 4, 2)),
    (nn.Dropout2d, F.dropout2d, (2, 4, 2, 2)),
    (nn.Dropout3d, F.dropout3d, (2, 4, 1, 2, 1)),
    (nn.AlphaDropout, F.alpha_dropout, (3, 4)),
    (nn.FeatureAlphaDropout, F.feature_alpha_dropout, (2, 4, 2, 2)),
)
"""With their functions, and the shape of inputs in examples."""

RULES = tuple(
    RandomScale(
        layer,
        functions=(function,),
        examples=(
            case(layer, 0.3, shape=shape),
            *(case(layer, rate, shape=shape, train=True) for rate in (0.0, 0.4, 1.0)),
            case(layer, 0.4, inplace=True, shape=shape, train=True),
        ),
    )
    for layer, function, shape in LAYERS
)
