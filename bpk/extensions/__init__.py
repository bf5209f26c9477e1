"""All extensions: what can be computed during a backward pass."""

from bpk.extensions.curvmatprod import GGNMP, HMP, PCHMP
from bpk.extensions.firstorder import BatchGrad, BatchL2Grad, ClippedGrad, SumGradSquared, Variance, WeightedGrad
from bpk.extensions.registry import load
from bpk.extensions.secondorder import (
    EKFAC,
    EKFLR,
    HBP,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
)

__all__ = [
    "EKFAC",
    "EKFLR",
    "GGNMP",
    "HBP",
    "HMP",
    "KFAC",
    "KFLR",
    "KFRA",
    "PCHMP",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchGrad",
    "BatchL2Grad",
    "ClippedGrad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
    "WeightedGrad",
]

# a file that is added to one of the folders is found without being named above
_found = {extension.__name__: extension for extension in load()}
globals().update(_found)
__all__ += [name for name in _found if name not in __all__]
