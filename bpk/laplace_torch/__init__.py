"""A backend of laplace-torch, and its approximations with predictions that need no Jacobians.

Importing this module imports laplace-torch (`pip install 'bpk[laplace]'`).
"""

from bpk.operators.linear import missing

try:
    from bpk.laplace_torch.approximations import (
        DiagLaplace,
        DiagLLLaplace,
        KronLaplace,
        KronLLLaplace,
        Laplace,
        LowRankLaplace,
    )
    from bpk.laplace_torch.backends import EF, GGN
    from bpk.laplace_torch.posterior import posterior_of
except ModuleNotFoundError as error:
    if error.name != "laplace":
        raise
    raise ImportError(missing("bpk.laplace_torch", "laplace-torch", "bpk[laplace]")) from error

__all__ = [
    "EF",
    "GGN",
    "DiagLLLaplace",
    "DiagLaplace",
    "KronLLLaplace",
    "KronLaplace",
    "Laplace",
    "LowRankLaplace",
    "posterior_of",
]
