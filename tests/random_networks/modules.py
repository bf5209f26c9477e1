"""Modules that random networks use beside those of `torch.nn`: containers, layers without a rule, parametrizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


# ---- containers ----------------------------------------------------------------------------------------
class Residual(nn.Module):
    """`x + inner(x)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gated(nn.Module):
    """`x * sigmoid(inner(x))`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.inner(x))


class Biased(nn.Module):
    """`inner(x) + bias`, with a parameter of its own beside a child."""

    def __init__(self, inner: nn.Module, features: int) -> None:
        super().__init__()
        self.inner = inner
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.bias


class Scaled(nn.Module):
    """`x + scale * inner(x)`, with a scale for each channel (layer scale)."""

    def __init__(self, inner: nn.Module, features: int) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(0.5 * torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class Pair(nn.Module):
    """Returns a dictionary with a tuple in it, and takes its argument by name."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *, data: Tensor) -> dict[str, Any]:
        return {"both": (self.first(data), self.second(input=data)), "steps": 2}


class Mixture(nn.Module):
    """Experts in a list, weighted by a gate."""

    def __init__(self, experts: list[nn.Module], gate: nn.Module) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(experts), gate

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([expert(x) for expert in self.experts], -1)
        return (found * self.gate(x).softmax(-1)[..., None, :]).sum(-1)


class ByName(nn.Module):
    """Children and parameters in dictionaries."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"up": nn.Linear(features, 2), "down": nn.Linear(2, features)})
        self.scales = nn.ParameterDict({"up": nn.Parameter(torch.randn(2)), "down": nn.Parameter(torch.randn(()))})

    def forward(self, x: Tensor) -> Tensor:
        for name in ("up", "down"):
            x = torch.tanh(self.layers[name](x)) * self.scales[name]
        return x


class Listed(nn.Module):
    """Parameters in a list, one for each step of a loop."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(features)) for _ in range(2)])
        self.layer = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        for shift in self.shifts:
            x = torch.sin(self.layer(x) + shift)
        return x


# ---- subclasses and layers without a rule ---------------------------------------------------------------
class MyLinear(nn.Linear):
    """A subclass that changes nothing."""


class OtherLinear(nn.Linear):
    """A subclass that changes everything: it has no rule."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(input @ self.weight.T) * 0.5 + self.bias


class Wave(nn.Module):
    """A layer without a rule and without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(2 * x) + 0.1 * x.square()


class Swirl(nn.Module):
    """A layer without a rule, with parameters that act nonlinearly."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(features)), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a * x) + self.b.exp() * x


class Attend(nn.Module):
    """A layer without a rule that takes two tensors and returns two."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(features, features))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.mix).tanh() * y, x + y


class Cube(torch.autograd.Function):
    """`x^3` with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return Cube.apply(x), in_dims[0]


class Cubed(nn.Module):
    """A layer around a function with a backward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)


class Positive(nn.Module):
    """A parametrization: `exp(x)`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Symmetric(nn.Module):
    """A parametrization: `(x + x^T) / 2`."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x.mT) / 2


# ---- losses without a rule ------------------------------------------------------------------------------
class LogCosh(nn.Module):
    """Registered as `AutodiffLoss`."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        terms = (prediction - target).cosh().log()
        return terms.mean() if self.reduction == "mean" else terms.sum()


class Coupled(LogCosh):
    """A loss that is no sum over entries: norms of samples. Registered as `AutodiffLoss`."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        terms = (1 + (prediction - target).flatten(1).square().sum(1)).sqrt()
        return terms.mean() if self.reduction == "mean" else terms.sum()


MODULES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Residual, Gated, Biased, Scaled, Pair, Mixture, ByName, Listed, MyLinear, OtherLinear, Wave, Swirl, Attend,
        Cube, Cubed, Positive, Symmetric,
    )
}  # fmt: skip
"""By the name that programs use."""
