"""Gradients multiplied with damped inverse curvature, between `loss.backward()` and `optimizer.step()`."""

from bpk.preconditioners.base import Preconditioner
from bpk.preconditioners.diagonal import DiagonalGGN
from bpk.preconditioners.ekfac import EKFAC
from bpk.preconditioners.kfac import KFAC
from bpk.preconditioners.schedules import Schedule

__all__ = ["EKFAC", "KFAC", "DiagonalGGN", "Preconditioner", "Schedule"]
