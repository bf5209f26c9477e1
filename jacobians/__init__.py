"""The algebra: what a rule is, families of rules, composition, symbolic derivation, checks."""

from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError, UnsupportedLayer
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.affine import Affine
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.branches import Concat, Sum
from bpk.jacobians.families.composite import Chain
from bpk.jacobians.families.contraction import Contraction
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.families.linear_map import LinearMap, Selection
from bpk.jacobians.families.multilinear import Multilinear
from bpk.jacobians.families.parts import same, submodule
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.losses.loss import AutodiffLoss, Loss
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule

__all__ = [
    "Affine",
    "Autodiff",
    "AutodiffLoss",
    "Call",
    "Chain",
    "Concat",
    "Contraction",
    "Elementwise",
    "Example",
    "LinearMap",
    "Loss",
    "Multilinear",
    "PointwiseLoss",
    "Registry",
    "Residual",
    "Rule",
    "RuleError",
    "Selection",
    "SeveralOutputs",
    "Sum",
    "UnsupportedLayer",
    "case",
    "check_rule",
    "same",
    "submodule",
]
