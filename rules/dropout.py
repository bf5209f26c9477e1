"""Dropout layers: every entry is multiplied by a random number in training mode and left alone otherwise."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bpk.jacobians.core.example import case
from bpk.jacobians.families.linear_map import RandomScale

RULES = (
    RandomScale(
        nn.Dropout,
        functions=(F.dropout,),
        examples=(
            case(nn.Dropout, 0.3, shape=(3, 5)),
            case(nn.Dropout, 0.3, shape=(3, 5), train=True),
            case(nn.Dropout, 0.5, inplace=True, shape=(2, 2, 3), train=True),
            case(nn.Dropout, 0.0, shape=(2, 3), train=True),
            case(nn.Dropout, 1.0, shape=(2, 3), train=True),
        ),
    ),
    RandomScale(
        nn.Dropout1d,
        functions=(F.dropout1d,),
        examples=(
            case(nn.Dropout1d, 0.3, shape=(3, 4, 2)),
            case(nn.Dropout1d, 0.4, shape=(3, 4, 2), train=True),
        ),
    ),
    RandomScale(
        nn.Dropout2d,
        functions=(F.dropout2d,),
        examples=(
            case(nn.Dropout2d, 0.3, shape=(2, 4, 2, 2)),
            case(nn.Dropout2d, 0.4, shape=(2, 4, 2, 2), train=True),
            case(nn.Dropout2d, 0.4, inplace=True, shape=(2, 3, 1, 2), train=True),
        ),
    ),
    RandomScale(
        nn.Dropout3d,
        functions=(F.dropout3d,),
        examples=(
            case(nn.Dropout3d, 0.3, shape=(2, 4, 1, 2, 1)),
            case(nn.Dropout3d, 0.4, shape=(2, 4, 1, 2, 1), train=True),
        ),
    ),
    RandomScale(
        nn.AlphaDropout,
        functions=(F.alpha_dropout,),
        examples=(
            case(nn.AlphaDropout, 0.3, shape=(3, 4)),
            case(nn.AlphaDropout, 0.3, shape=(3, 4), train=True),
            case(nn.AlphaDropout, 0.0, shape=(3, 4), train=True),
            case(nn.AlphaDropout, 1.0, shape=(3, 4), train=True),
            case(nn.AlphaDropout, 0.5, inplace=True, shape=(2, 2, 3), train=True),
        ),
    ),
    RandomScale(
        nn.FeatureAlphaDropout,
        functions=(F.feature_alpha_dropout,),
        examples=(
            case(nn.FeatureAlphaDropout, 0.3, shape=(2, 4, 2, 2)),
            case(nn.FeatureAlphaDropout, 0.4, shape=(2, 4, 2, 2), train=True),
        ),
    ),
)
