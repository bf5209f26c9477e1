"""Base classes of first-order extensions: they need the gradient that autograd brings, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from bpk.extensions.backprop_extension import FAIL_WARN, BackpropExtension
from bpk.extensions.module_extension import ModuleExtension
from bpk.sweeps.sweep import Gradient, Sweep


class FirstOrderBackpropExtension(BackpropExtension):
    """An extension that works through module extensions (and rules, where it overrides `value`)."""

    def __init__(
        self,
        savefield: str,
        module_exts: Mapping[type[nn.Module], ModuleExtension] | None = None,
        fail_mode: str = FAIL_WARN,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        super().__init__(savefield, module_exts, fail_mode, subsampling)


class GradientExtension(FirstOrderBackpropExtension):
    """A first-order extension that serves every rule.

    Args:
        subsampling: Indices of the samples considered (all by default).
    """

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(self.field, subsampling=subsampling)

    def sweep(self) -> Sweep:
        return Gradient(self.subsampling)


class FirstOrderModuleExtension(ModuleExtension):
    """Base class of hand-written module extensions for first-order extensions.

    Subclass it with one method per parameter, named like the parameter:
    `weight(self, ext, module, g_inp, g_out, bpQuantities) -> value of the field`.
    """
