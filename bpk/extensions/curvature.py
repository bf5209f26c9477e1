"""The curvature matrices that extensions refer to."""

from __future__ import annotations

from enum import Enum


class Curvature(Enum):
    """Hessian, generalised Gauss-Newton matrix, and positive-curvature Hessian."""

    HESSIAN = "hessian"
    GGN = "ggn"
    PCH = "pch"
