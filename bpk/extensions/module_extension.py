"""Hand-written support for one layer and one extension, the way BackPACK's users know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

GradTuple = tuple[Tensor | None, ...]


class ModuleExtension:
    """Base class of hand-written module extensions.

    Subclass it with one method per parameter, named like the parameter, that returns the value of the field:

        def weight(self, ext, module, g_inp, g_out, bpQuantities): ...

    and, for second-order extensions, with `backpropagate`, which returns what the layer's input receives.
    `ext` is the extension; `module.input0`, `module.output` hold the forward pass; `g_inp`, `g_out` are tuples of
    gradients.

    Args:
        params: Names of the parameters, each with a method.
    """

    def __init__(self, params: Sequence[str] | None = None) -> None:
        self.params = list(params or [])
        for name in self.params:
            if not callable(getattr(self, name, None)):
                raise NotImplementedError(f"{type(self).__name__} lists parameter '{name}' but has no method '{name}'.")

    def backpropagate(
        self, ext: Any, module: nn.Module, grad_inp: GradTuple, grad_out: GradTuple, bpQuantities: Any
    ) -> Any:
        """What the layer's input receives, from what its output has received (`None`: nothing travels)."""
        return None

    def extract(self, name: str, ext: Any, module: nn.Module, g_inp: GradTuple, g_out: GradTuple, quantity: Any) -> Any:
        """Call the method of one parameter."""
        return getattr(self, name)(ext, module, g_inp, g_out, quantity)
