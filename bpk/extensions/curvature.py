"""The curvature matrices that extensions refer to, under the name by which BackPACK's users know it."""

from bpk.sweeps.curvature import Curvature

__all__ = ["Curvature"]
