"""The tensors that a forward pass leaves on a layer, for module extensions that users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from bpk.recording import engine

INPUT_NAMES = tuple(f"input{k}" for k in range(16))
"""Under which names the inputs of a layer are left on it."""


def nothing() -> None:
    """What a copy gets in place of something that belongs to one forward pass."""


class Stored(Tensor):
    """A tensor that a forward pass has left on a layer: copies of the layer, and files, do without."""

    __torch_function__ = engine.no_torch_function  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def stored(x: Tensor) -> Tensor:
    """An alias without a graph."""
    alias = x.detach()
    if type(alias) is Tensor:
        alias.__class__ = Stored  # half as long as making it one
    return alias


def store_on(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
    """Leave aliases of inputs and output on a module (`input0`, ..., `output`); returns the last one."""
    fields = module.__dict__
    for name, x in zip(INPUT_NAMES, inputs, strict=False):
        fields[name] = stored(x)
    alias = fields["output"] = stored(output)
    return alias


def forget(module: nn.Module, output: Tensor | None = None) -> None:
    """Remove the tensors that `store_on` left on a module; if an `output` is given, only those that came with it."""
    fields = module.__dict__
    if output is not None and fields.get("output") is not output:
        return
    fields.pop("output", None)
    for name in INPUT_NAMES:
        if fields.pop(name, None) is None:
            break
