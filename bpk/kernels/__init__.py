"""Whole models: neural tangent kernels, eigenpairs of curvature, predictive covariances, influence.

Each is a sum over parameters of statistics of `bpk.fields.products`; nothing of the size `[N, P]` is built.
"""

from bpk.kernels.eigenpairs import Eigenpairs, eigenpairs
from bpk.kernels.ntk import ntk
from bpk.kernels.posteriors import Diagonal, Eigenbases, Kronecker, LowRank
from bpk.kernels.predictive import predictive_covariance
from bpk.kernels.projected import projected_gradients
from bpk.kernels.summed import Summed

__all__ = [
    "Diagonal",
    "Eigenbases",
    "Eigenpairs",
    "Kronecker",
    "LowRank",
    "Summed",
    "eigenpairs",
    "ntk",
    "predictive_covariance",
    "projected_gradients",
]
