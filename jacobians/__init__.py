"""The algebra: what a rule is, families of rules, composition, symbolic derivation, checks."""

from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError, UnsupportedLayer
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.affine import Affine
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.composite import Chain
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.families.linear_map import LinearMap
from bpk.jacobians.families.multilinear import Multilinear
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule

__all__ = [
    "Affine",
    "Autodiff",
    "Call",
    "Chain",
    "Elementwise",
    "Example",
    "LinearMap",
    "Multilinear",
    "Registry",
    "Residual",
    "Rule",
    "RuleError",
    "UnsupportedLayer",
    "case",
    "check_rule",
]
