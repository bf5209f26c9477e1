"""The derivatives of single layers, for scripts that multiply with Jacobians themselves.

>>> import torch, bpk
>>> from bpk.core.derivatives import derivatives_for
>>> layer = bpk.extend(torch.nn.Linear(3, 2))
>>> out = layer(torch.ones(4, 3))
>>> derivative = derivatives_for[torch.nn.Linear]
>>> derivative.jac_t_mat_prod(module=layer, mat=torch.ones(5, 4, 2)).shape
torch.Size([5, 4, 3])
>>> derivative.param_mjp("weight", layer, None, None, torch.ones(5, 4, 2), sum_batch=False).shape
torch.Size([5, 4, 2, 3])
"""

from bpk.core.derivatives.layers import LayerDerivatives
from bpk.core.derivatives.losses import LossDerivatives
from bpk.core.derivatives.table import DerivativesFor, derivatives_for

__all__ = ["DerivativesFor", "LayerDerivatives", "LossDerivatives", "derivatives_for"]
