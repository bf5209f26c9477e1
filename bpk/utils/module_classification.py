"""What kind of module something is, as the registry of rules knows it."""

from __future__ import annotations

from torch import nn

from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.losses.pointwise import PointwiseLoss, standard_normal
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy
from bpk.rules import REGISTRY

GAUSSIAN = (nn.MSELoss, nn.GaussianNLLLoss)
"""Losses whose predictive distribution is normal, so that their scores are standard normal numbers."""


def is_loss(module: nn.Module) -> bool:
    """Whether a module is a loss: one with a rule for losses, or one of torch's.

    >>> from torch import nn
    >>> is_loss(nn.HuberLoss()), is_loss(nn.Linear(1, 1))
    (True, False)
    """
    return isinstance(REGISTRY.find(module), Loss) or isinstance(module, nn.modules.loss._Loss)


def is_nll(module: nn.Module) -> bool:
    """Whether a loss is a negative log-likelihood whose Fisher information is its Hessian.

    Sampled curvature (`DiagGGNMC`, `KFAC`) then draws targets from the predictive distribution. For other losses
    it draws normal numbers with the Hessian as covariance, which gives the same expectation.

    >>> from torch import nn
    >>> is_nll(nn.MSELoss()), is_nll(nn.CrossEntropyLoss()), is_nll(nn.BCEWithLogitsLoss()), is_nll(nn.HuberLoss())
    (True, True, True, False)
    """
    rule = REGISTRY.find(module)
    if isinstance(module, nn.PoissonNLLLoss):
        return module.log_input  # the Fisher information of the rate itself is not the Hessian
    own_draw = isinstance(rule, PointwiseLoss) and rule.draw is not standard_normal
    return own_draw or isinstance(rule, SoftmaxCrossEntropy) or isinstance(module, GAUSSIAN)
