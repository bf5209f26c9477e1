"""Linear and bilinear layers, with any number of axes between batch and features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bpk.jacobians.core.example import case
from bpk.jacobians.core.function_module import TimesWeight
from bpk.jacobians.families.contraction import Contraction

RULES = (
    Contraction(
        "... i, o i -> ... o",
        nn.Linear,
        functions=(F.linear,),
        examples=(
            case(nn.Linear, 4, 3, shape=(5, 4)),
            case(nn.Linear, 4, 3, bias=False, shape=(5, 4)),
            case(nn.Linear, 4, 3, shape=(3, 5, 4)),
            case(nn.Linear, 3, 2, shape=(2, 3, 2, 3)),
            case(nn.Linear, 1, 1, shape=(3, 1)),
        ),
    ),
    Contraction(
        "... i, i o -> ... o",
        TimesWeight,
        examples=(
            case(TimesWeight, 4, 3, shape=(5, 4)),
            case(TimesWeight, 4, 3, bias=False, shape=(3, 5, 4)),
            case(TimesWeight, 3, 2, shape=(2, 3, 2, 3)),
        ),
    ),
    Contraction(
        "... i, ... j, o i j -> ... o",
        nn.Bilinear,
        functions=(F.bilinear,),
        examples=(
            case(nn.Bilinear, 3, 2, 4, shapes=((5, 3), (5, 2))),
            case(nn.Bilinear, 3, 2, 4, bias=False, shapes=((5, 3), (5, 2))),
            case(nn.Bilinear, 2, 3, 2, shapes=((3, 4, 2), (3, 4, 3))),
        ),
    ),
)
