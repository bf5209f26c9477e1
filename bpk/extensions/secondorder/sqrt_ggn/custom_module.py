"""Module extensions of scaling and summation."""

from bpk.custom_module.branching import SumModule
from bpk.custom_module.scale_module import ScaleModule
from bpk.extensions.secondorder.sqrt_ggn.base import made_for

SqrtGGNScaleModule, SqrtGGNSumModule = made_for(__name__, ScaleModule, SumModule)
