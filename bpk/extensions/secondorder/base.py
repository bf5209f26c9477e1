"""Base class of second-order extensions: something beside the gradient travels backwards."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.options import positive
from bpk.fields.statistics import Uses
from bpk.fields.sums import add_into
from bpk.fields.tokens import together
from bpk.sweeps.module_extension_sweep import ModuleExtensionSweep
from bpk.sweeps.starts.square_root import SquareRoot
from bpk.sweeps.sweep import Sweep


class SecondOrderBackpropExtension(BackpropExtension):
    """An extension that starts at an extended, scalar loss and backpropagates more than the gradient."""

    second_order = True

    def sweep(self) -> Sweep:
        """Default: whatever module extensions return."""
        return ModuleExtensionSweep(self.subsampling)

    @property
    def works_by_rules(self) -> bool:
        return type(self).sweep is not SecondOrderBackpropExtension.sweep


class OfSamples(SecondOrderBackpropExtension):
    """An extension of some samples, whose class names its field.

    Args:
        subsampling: Indices of the samples considered (all by default).
    """

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(self.field, subsampling=subsampling)


class SquareRootExtension(OfSamples):
    """An extension that listens to a square root of the GGN."""

    mc_samples: int | None = None

    def get_num_mc_samples(self) -> int | None:
        return self.mc_samples

    def sweep(self) -> Sweep:
        return SquareRoot(self.mc_samples, self.subsampling)


class SumOfSquares(BackpropExtension):
    """Common part: `sum_v s_v (J^T u_v)^2` over columns, and over samples where these are not needed by themselves."""

    combines = True

    def value(self, uses: Uses) -> Tensor:
        return uses.squared_sum(per_sample=self.needs_samples)

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return add_into(before, value)


class SampledRootExtension(SquareRootExtension):
    """An extension that listens to a sampled square root of the GGN.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).
    """

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(subsampling)
        self.mc_samples = positive("mc_samples", mc_samples)


class TokenExtension(OfSamples):
    """An extension that listens to the columns of single tokens, starting at the loss.

    `T` counts the terms that the loss adds up for a sample: rows of the prediction, and positions in each.
    """

    combines = True

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return together(before, value)
