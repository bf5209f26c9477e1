"""First-order extensions."""

from bpk.extensions.firstorder.batch_grad import BatchGrad
from bpk.extensions.firstorder.batch_l2_grad import BatchL2Grad
from bpk.extensions.firstorder.clipped_grad import ClippedGrad
from bpk.extensions.firstorder.sum_grad_squared import SumGradSquared
from bpk.extensions.firstorder.variance import Variance
from bpk.extensions.firstorder.weighted_grad import WeightedGrad

__all__ = ["BatchGrad", "BatchL2Grad", "ClippedGrad", "SumGradSquared", "Variance", "WeightedGrad"]
