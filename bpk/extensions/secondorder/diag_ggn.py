"""Diagonal of the generalised Gauss-Newton matrix (GGN), exact and sampled, summed and per sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.extensions.backprop_extension import positive
from bpk.extensions.secondorder.base import SecondOrderBackpropExtension
from bpk.statistics import Uses
from bpk.sweeps import SquareRoot, Sweep


class DiagGGN(SecondOrderBackpropExtension):
    """Common part: `diag(J^T H J) = sum_v (J^T S_v)^2` with `H = S S^T`, the loss Hessian at the model's output."""

    def __init__(self, savefield: str, mc_samples: int | None, subsampling: Sequence[int] | None) -> None:
        super().__init__(savefield, subsampling=subsampling)
        self.mc_samples = mc_samples

    def get_num_mc_samples(self) -> int | None:
        """The number of Monte-Carlo samples (`None`: exact)."""
        return self.mc_samples

    def sweep(self) -> Sweep:
        return SquareRoot(self.mc_samples, self.subsampling)

    def value(self, uses: Uses) -> Tensor:
        return uses.squared_sum(per_sample=self.needs_samples)


class DiagGGNExact(DiagGGN):
    """Diagonal of the GGN `[*p]`, summed over samples, in the field `diag_ggn_exact`.

    Args:
        subsampling: Indices of the samples considered (all by default).
    """

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("diag_ggn_exact", None, subsampling)


class DiagGGNMC(DiagGGN):
    """Monte-Carlo estimate of the diagonal of the GGN `[*p]` in the field `diag_ggn_mc`.

    The loss Hessian is replaced by gradients at targets drawn from the loss's predictive distribution.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).
    """

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("diag_ggn_mc", positive("mc_samples", mc_samples), subsampling)


class BatchDiagGGNExact(DiagGGN):
    """Diagonal of every sample's GGN `[N, *p]` in the field `diag_ggn_exact_batch`.

    `diag_ggn_exact_batch.sum(0) == diag_ggn_exact`: the loss scaling `1/N` is included.

    Args:
        subsampling: Indices of the samples considered (all by default).
    """

    needs_samples = True

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("diag_ggn_exact_batch", None, subsampling)


class BatchDiagGGNMC(DiagGGN):
    """Monte-Carlo estimate of the diagonal of every sample's GGN `[N, *p]` in `diag_ggn_mc_batch`.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).
    """

    needs_samples = True

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("diag_ggn_mc_batch", positive("mc_samples", mc_samples), subsampling)
