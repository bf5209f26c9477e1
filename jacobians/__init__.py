"""The algebra: what a rule is, families of rules, composition, symbolic derivation, checks."""

from bpk.jacobians.affine import Affine
from bpk.jacobians.autodiff import Autodiff
from bpk.jacobians.call import Call
from bpk.jacobians.check import check_rule
from bpk.jacobians.composite import Chain
from bpk.jacobians.elementwise import Elementwise
from bpk.jacobians.errors import RuleError, UnsupportedLayer
from bpk.jacobians.linear_map import LinearMap
from bpk.jacobians.multilinear import Multilinear
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Example, Residual, Rule, case

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
