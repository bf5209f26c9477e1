"""bpk: more out of every backward pass.

During one `loss.backward()`, `bpk` computes what autograd does not give beside the gradient: individual
gradients, their norms and variance, diagonals of the GGN and the Hessian, Kronecker factors, matrix square
roots, and products with curvature blocks.

>>> import torch, bpk
>>> from bpk.extensions import DiagGGNExact, Variance
>>> model = bpk.extend(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)))
>>> loss_fn = bpk.extend(torch.nn.CrossEntropyLoss())
>>> with bpk.backpack(Variance(), DiagGGNExact()):
...     loss_fn(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
>>> model[0].weight.variance.shape, model[0].weight.diag_ggn_exact.shape
(torch.Size([3, 4]), torch.Size([3, 4]))
"""

from bpk import context, distributed, extensions, operators, plot, preconditioners
from bpk.context import CTX, backpack, disable
from bpk.costing.cost import Cost, cost
from bpk.dataset import Accumulated, accumulate
from bpk.dropin import install_as_backpack
from bpk.extending import convert_module_to_backpack, extend, memory_cleanup
from bpk.forward.derivatives import input_hessian_diag, laplacian, taylor
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.rule import Rule
from bpk.kernels import Summed, eigenpairs, ntk, predictive_covariance, projected_gradients
from bpk.reading import Fields, fields_of
from bpk.registering import check_rule, register, unregister
from bpk.support.matrix import support_matrix
from bpk.support.of_model import support
from bpk.verification import verify

__version__ = "0.1.0"

__all__ = [
    "CTX",
    "Accumulated",
    "Autodiff",
    "Cost",
    "Fields",
    "Rule",
    "Summed",
    "accumulate",
    "backpack",
    "check_rule",
    "context",
    "convert_module_to_backpack",
    "cost",
    "disable",
    "distributed",
    "eigenpairs",
    "extend",
    "extensions",
    "fields_of",
    "input_hessian_diag",
    "install_as_backpack",
    "laplacian",
    "memory_cleanup",
    "ntk",
    "operators",
    "plot",
    "preconditioners",
    "predictive_covariance",
    "projected_gradients",
    "register",
    "support",
    "support_matrix",
    "taylor",
    "unregister",
    "verify",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted((*__all__, "__doc__", "__version__"))
