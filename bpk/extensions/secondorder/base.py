"""Base class of second-order extensions: something beside the gradient travels backwards."""

from __future__ import annotations

from collections.abc import Sequence

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.sweeps.by_hand import ByHand
from bpk.sweeps.square_root import SquareRoot
from bpk.sweeps.sweeps import Sweep


class SecondOrderBackpropExtension(BackpropExtension):
    """An extension that starts at an extended, scalar loss and backpropagates more than the gradient."""

    second_order = True

    def sweep(self) -> Sweep:
        """Default: whatever module extensions return."""
        return ByHand(self.subsampling)

    @property
    def works_by_rules(self) -> bool:
        return not isinstance(self.sweep(), ByHand)


class SquareRootExtension(SecondOrderBackpropExtension):
    """An extension that listens to a square root of the GGN, exact (`mc_samples=None`) or sampled."""

    def __init__(self, savefield: str, mc_samples: int | None, subsampling: Sequence[int] | None) -> None:
        super().__init__(savefield, subsampling=subsampling)
        self.mc_samples = mc_samples

    def get_num_mc_samples(self) -> int | None:
        return self.mc_samples

    def sweep(self) -> Sweep:
        return SquareRoot(self.mc_samples, self.subsampling)
