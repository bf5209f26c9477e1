"""Curvature and Jacobians of a model on a data set as linear operators: products `A @ v`, without the matrix."""

from bpk.operators.curvature import GGN, Hessian
from bpk.operators.fisher import EmpiricalFisher, Fisher
from bpk.operators.jacobian import Jacobian
from bpk.operators.kfac import KFAC
from bpk.operators.linear import Adjoint, LinearOperator

__all__ = ["GGN", "KFAC", "Adjoint", "EmpiricalFisher", "Fisher", "Hessian", "Jacobian", "LinearOperator"]
