"""Second-order extensions."""

from bpk.extensions.secondorder.diag_ggn import BatchDiagGGNExact, BatchDiagGGNMC, DiagGGNExact, DiagGGNMC
from bpk.extensions.secondorder.diag_hessian import BatchDiagHessian, DiagHessian
from bpk.extensions.secondorder.ekfac import EKFAC, EKFLR
from bpk.extensions.secondorder.hbp import HBP, KFAC, KFLR, KFRA
from bpk.extensions.secondorder.sqrt_ggn import SqrtGGNExact, SqrtGGNMC

__all__ = [
    "EKFAC",
    "EKFLR",
    "HBP",
    "KFAC",
    "KFLR",
    "KFRA",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "SqrtGGNExact",
    "SqrtGGNMC",
]
