"""Targets for examples of losses, drawn for predictions of a shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.example import Example, case


class ClassTargets:
    """Random class indices for predictions `[N, C, *d]`; the first ones are `ignored`."""

    def __init__(self, ignored: int | None = None) -> None:
        self.ignored = ignored

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        if self.ignored is not None:
            target[:1] = self.ignored
        return target


def class_probabilities(shape: tuple[int, ...]) -> Tensor:
    """A distribution over axis 1."""
    return torch.randn(shape, dtype=torch.float64).softmax(1)


def real_numbers(shape: tuple[int, ...]) -> Tensor:
    """Standard normal targets."""
    return torch.randn(shape, dtype=torch.float64)


def fractions(shape: tuple[int, ...]) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64)


def labels(shape: tuple[int, ...]) -> Tensor:
    """Zeros and ones."""
    return torch.rand(shape, dtype=torch.float64).round()


def signs(shape: tuple[int, ...]) -> Tensor:
    """Minus ones and ones."""
    return 2 * labels(shape) - 1


def numbers_of_events(shape: tuple[int, ...]) -> Tensor:
    """Small non-negative integers."""
    return torch.randint(5, shape).double()


class WithVariance:
    """Real targets and a positive variance; `lacks` axes less than the prediction, or one value along `along`."""

    def __init__(self, lacks: int = 0, along: int | None = None) -> None:
        self.lacks = lacks
        self.along = along

    def __call__(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        var_shape = list(shape[: len(shape) - self.lacks])
        if self.along is not None:
            var_shape[self.along] = 1
        return real_numbers(shape), 0.5 + fractions(tuple(var_shape))


def both(loss: type[nn.Module], shape: tuple[int, ...], target: Any, **options: Any) -> tuple[Example, Example]:
    """An example for each of the reductions "mean" and "sum"; `options` of the loss, or `domain` of the example."""
    return (
        case(loss, shape=shape, target=target, reduction="mean", **options),
        case(loss, shape=shape, target=target, reduction="sum", **options),
    )


def weights(*values: float) -> Tensor:
    """A weight tensor in double precision."""
    return torch.tensor(values, dtype=torch.float64)


LABELS = ClassTargets()
