"""Copies of models and losses, which `verify` works on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bpk.extending import detach
from bpk.jacobians.core.errors import value_error


def duplicate(module: nn.Module, dtype: torch.dtype | None) -> Any:
    """A deep copy without the hooks of `extend`, in another precision if asked."""
    try:
        with WithoutGraphs():
            made = copy.deepcopy(module)
    except Exception as error:
        raise value_error(
            f"{type(module).__name__} cannot be copied (copy.deepcopy): {error}",
            "verify works on a copy, so that the model stays as it is.",
            "pass a freshly built model, before its first forward pass.",
        ) from error
    for child in made.modules():
        detach(child)
    if dtype is None:
        return made
    held = [*made.parameters(), *made.buffers()]
    if not any(x.is_complex() for x in held):
        return made.to(dtype)
    for x in held:  # `to` would drop the imaginary part
        x.data = in_precision(x.data, dtype)
    return made


def in_precision(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Real and complex numbers in this precision; all others as they are."""
    if x.is_complex():
        return x.to(dtype.to_complex())
    return x.to(dtype) if x.is_floating_point() else x


class WithoutGraphs(TorchFunctionMode):
    """While it is entered, results of a forward pass that a module has kept are copied without their graph.

    Networks keep attention weights, auxiliary losses, or the state of their neurons; torch copies leaves only.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
