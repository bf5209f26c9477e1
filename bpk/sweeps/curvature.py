"""The curvature matrices that extensions refer to."""

from __future__ import annotations

from enum import Enum


class Curvature(Enum):
    """Hessian, generalised Gauss-Newton matrix, and positive-curvature Hessian.

    The last one makes residuals positive: by clipping negative eigenvalues, or by taking absolute values.
    """

    HESSIAN = "hessian"
    GGN = "ggn"
    PCH_CLIP = "pch-clip"
    PCH_ABS = "pch-abs"
    PCH = PCH_CLIP
