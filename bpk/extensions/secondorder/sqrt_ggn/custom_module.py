"""Module extensions of scaling and summation."""

from __future__ import annotations

from bpk.custom_module.branching import SumModule
from bpk.custom_module.scale_module import ScaleModule
from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNScaleModule(SqrtGGNBaseModule):
    """For `ScaleModule`."""

    layer = ScaleModule


class SqrtGGNSumModule(SqrtGGNBaseModule):
    """For `SumModule`."""

    layer = SumModule
