"""The table from classes of layers to their derivatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from bpk.core.derivatives.layers import LayerDerivatives
from bpk.core.derivatives.losses import LossDerivatives
from bpk.jacobians.core.errors import NotThere
from bpk.jacobians.losses.loss import Loss
from bpk.rules import REGISTRY


class NoDerivatives(NotThere):
    """A layer has no rule."""


class DerivativesFor(Mapping[type[nn.Module], LayerDerivatives]):
    """By the class of a layer, or by a layer: its rule, callable the way BackPACK's derivatives are.

    >>> from torch import nn
    >>> derivatives_for[nn.ReLU()]
    LayerDerivatives(Elementwise(ReLU))
    """

    def __getitem__(self, layer: type[nn.Module] | nn.Module) -> LayerDerivatives:
        rule = REGISTRY.find(layer) if isinstance(layer, (type, nn.Module)) else None
        if rule is None:
            name = getattr(layer, "__name__", type(layer).__name__)
            raise NoDerivatives(
                f"There are no derivatives for {name}.",
                "bpk has no rule for this class of layer.",
                f"bpk.register() a rule for it; bpk.register(Autodiff({name}, params=(...))) is the shortest.",
            )
        return LossDerivatives(rule) if isinstance(rule, Loss) else LayerDerivatives(rule)

    def __iter__(self) -> Iterator[type[nn.Module]]:
        return (module for rule in REGISTRY for module in rule.modules)

    def __len__(self) -> int:
        return sum(len(rule.modules) for rule in REGISTRY)


derivatives_for = DerivativesFor()


class NamedDerivatives(LayerDerivatives):
    """The derivatives of a class of layers, created without arguments as in BackPACK."""

    layer: type[nn.Module]
    """That class."""

    def __init__(self) -> None:
        super().__init__(derivatives_for[self.layer].rule)
