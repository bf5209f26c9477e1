"""The curvature matrices that extensions refer to."""

from __future__ import annotations

from enum import Enum

from torch import Tensor


class Curvature(Enum):
    """Hessian, generalised Gauss-Newton matrix, and positive-curvature Hessian.

    The last one makes residuals positive: by clipping negative eigenvalues, or by taking absolute values.
    """

    HESSIAN = "hessian"
    GGN = "ggn"
    PCH_CLIP = "pch-clip"
    PCH_ABS = "pch-abs"
    PCH = PCH_CLIP

    @property
    def is_positive(self) -> bool:
        """Whether residuals are made positive."""
        return self in (Curvature.PCH_CLIP, Curvature.PCH_ABS)

    def positive(self, eigenvalues: Tensor) -> Tensor:
        """Eigenvalues of a residual, made positive."""
        return eigenvalues.abs() if self is Curvature.PCH_ABS else eigenvalues.clamp(min=0)
