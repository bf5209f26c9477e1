"""Losses of any signature: where in the arguments of a forward call its tensors are, and how to call it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bpk.jacobians.core.again import call_again
from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Options
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.nested import Slot, fill, mapped
from bpk.jacobians.core.side_by_side import taken_apart

Filled = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and the positional and named arguments of a call."""


class Arguments(Protocol):
    """Options of a call that know how its arguments are made of tensors."""

    def fill(self, inputs: Sequence[Tensor]) -> Filled:
        """Put tensors in their places."""


@dataclass(frozen=True)
class Given:
    """The arguments of one call of a loss, with slots in place of tensors (anywhere in nested ones)."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fill(self, inputs: Sequence[Tensor]) -> Filled:
        """Put tensors in their places."""
        return self.module, fill(self.args, inputs), fill(dict(self.kwargs), inputs)


@dataclass(frozen=True)
class SideBySide:
    """Where the arguments of a loss are, once some of its inputs are merged into the first one."""

    options: Options
    shapes: Mapping[int, torch.Size]

    def fill(self, inputs: Sequence[Tensor]) -> Filled:
        """Module and arguments, for tensors that start with the joint prediction."""
        parts, others = taken_apart(inputs[0], self.shapes, 1), iter(inputs[1:])
        count = len(inputs) - 1 + len(self.shapes)
        return filled(self.options, [parts[i] if i in parts else next(others) for i in range(count)])


def bind_any(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
    """See the tensors of any call of a loss: those that require grad come first, they are its predictions."""
    tensors: list[Tensor] = []

    def slot(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tensors.append(x)
        return Slot(len(tensors) - 1)

    template = mapped((args, dict(kwargs)), slot)
    order = sorted(range(len(tensors)), key=lambda k: not tensors[k].requires_grad)
    seen = tuple(tensors[k] for k in order)
    if not kwargs and len(args) == len(seen) and all(x is y for x, y in zip(args, seen, strict=True)):
        return Binding(module, seen)
    return Binding(Given(module, *fill(template, [Slot(order.index(k)) for k in range(len(tensors))])), seen)


def filled(options: Options, inputs: Sequence[Tensor]) -> Filled:
    """The module and the arguments of a call, from its options and its tensors."""
    return (options, tuple(inputs), {}) if isinstance(options, nn.Module) else options.fill(inputs)


def evaluate(filled: Filled, dtype: torch.dtype) -> Tensor:
    """Call a loss again, with its parameters and buffers in this precision; the module stays as it is."""
    module, args, kwargs = filled
    state = {name: cast(x, dtype) for name, x in module.named_parameters()}
    state.update({name: cast(x, dtype).clone() for name, x in module.named_buffers()})  # forward may write to them
    return call_again(module, state, args, kwargs)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Change the precision of floating-point numbers only."""
    return x.to(dtype) if x.is_floating_point() else x


def reduced(terms: Tensor, reduction: str) -> Tensor:
    """What a loss makes of its terms."""
    if reduction == "none":
        return terms
    return terms.mean() if reduction == "mean" else terms.sum()


def trains(module: nn.Module) -> bool:
    """Whether a module has parameters that are trained. Those of a teacher, or of a network that compares, are not."""
    return any(p.requires_grad for p in module.parameters())


def unknown_divisor() -> UnsupportedLayer:
    """The refusal to say by what a loss divides that was given weights for its terms."""
    return UnsupportedLayer(
        "It is not known by what a loss with weights for its terms divides their sum.",
        "batches must be weighted as one large batch would, and the weights do not tell how.",
        "say so by divisor=: in accumulate, a function of the batch (lambda batch: batch['mask'].sum()), in "
        'all_reduce, the number of this rank, and "sum" where terms are added up.',
    )
