"""Backward passes that bring one statistic of each parameter, summed over parameters."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bpk.context import backpack
from bpk.extending import check_module, extend
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.secondorder.base import SquareRootExtension
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import value_error
from bpk.kernels.summed import Summed
from bpk.recording.activations import forget
from bpk.recording.membership import parts_of
from bpk.sweeps.starts.square_root import WeightedRoot
from bpk.sweeps.sweep import Sweep

Compute = Callable[[Uses], Tensor]


class OfGradients(GradientExtension):
    """A statistic of individual gradients, under the name `field`."""

    def __init__(self, field: str, compute: Compute) -> None:
        self.field, self.compute = field, compute
        super().__init__()

    def value(self, uses: Uses) -> Tensor:
        return self.compute(uses)


class OfRoot(SquareRootExtension):
    """A statistic of the columns of a square root of the GGN, exact or sampled."""

    def __str__(self) -> str:
        return "This quantity"  # of a function (bpk.ntk, ...), which has no extension that users know

    def __init__(self, field: str, compute: Compute, mc_samples: int | None = None) -> None:
        self.field, self.compute, self.mc_samples = field, compute, mc_samples
        super().__init__()

    def value(self, uses: Uses) -> Tensor:
        return self.compute(uses)


class Joined(OfRoot):
    """One that takes each column for itself, so that columns may travel a few at a time: values are added or joined."""

    combines = True

    def __init__(self, field: str, compute: Compute, adds: bool) -> None:
        self.adds = adds
        super().__init__(field, compute)

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return before + value if self.adds else torch.cat([before, value])


class OfSums(OfRoot):
    """What is made of columns `sum_v w_kv s_v` of a root, for weights `[K, V, N]`, a few of the `K` at a time."""

    combines = True

    def __init__(self, field: str, compute: Compute, weights: Tensor, mc_samples: int | None = None) -> None:
        super().__init__(field, compute, mc_samples)
        self.weights = weights

    def sweep(self) -> Sweep:
        return WeightedRoot(self.weights, self.mc_samples)

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return before + value


class HalfSquaredError(nn.Module):
    """`sum f² / 2`: its Hessian is the identity, so that the columns of its root are rows of the Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = extend(nn.MSELoss(reduction="sum"))

    def forward(self, outputs: Tensor) -> Tensor:
        return 0.5 * self.squares(outputs, torch.zeros_like(outputs))


LOSSES: WeakKeyDictionary[nn.Module, HalfSquaredError] = WeakKeyDictionary()
"""That of each model: what was found out about samples, in graphs of one form, is kept by the loss."""


def half_squared_error(model: nn.Module) -> HalfSquaredError:
    """The loss for passes over a model's outputs."""
    known = LOSSES.get(model)
    if known is None:
        known = LOSSES[model] = HalfSquaredError()
    return known


def require_loss(loss: object) -> None:
    """Refuse what is no differentiable scalar."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise value_error(
            f"The loss is {what}, and not a number that depends on parameters.",
            "one backward pass starts at it.",
            "pass what the extended loss returns: loss_fn(model(x), y), outside of torch.no_grad().",
        )


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, by name."""
    check_module(model)
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise value_error(
            f"No parameter of {type(model).__name__} requires gradients.",
            "derivatives are taken in those that do.",
            "call requires_grad_(True) on some of them.",
        )
    return found


def run(model: nn.Module, loss: Tensor, *extensions: OfGradients | OfRoot, keep: bool = False) -> Summed:
    """Statistics added up over parameters; `p.grad` stays as it is."""
    params = trained(model)
    require_loss(loss)
    require_all_extended(model, params)
    total = Summed(*(extension.field for extension in extensions))
    with backpack(*extensions, extension_hook=total, retain_graph=keep):
        torch.autograd.grad(loss, [*params.values()], retain_graph=keep, allow_unused=True)
    return total


def require_all_extended(model: nn.Module, params: dict[str, Tensor]) -> None:
    """Refuse models of which a part is extended: the sum over parameters would be that of the part."""
    inside = {id(p) for part in parts_of(model).values() for p in part.parameters()}
    outside = [name for name, p in params.items() if id(p) not in inside]
    if outside:
        raise value_error(
            f"{type(model).__name__} is extended in parts, without '{outside[0]}'.",
            "the quantity is that of all parameters that require gradients.",
            "call bpk.extend(model) before the forward pass, and requires_grad_(False) on what is to be left out.",
        )


def of_outputs(model: nn.Module, outputs: Tensor, *extensions: OfRoot) -> Summed:
    """Statistics of the Jacobian of a model's outputs: column `c` of the root is the row of output `c`."""
    with torch.enable_grad():
        loss = half_squared_error(model)(outputs)
    try:
        return run(model, loss, *extensions)
    finally:  # the pass does not come to layers before the first parameter that requires gradients
        for layer in model.modules():
            forget(layer)
