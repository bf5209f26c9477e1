"""The tensors that a forward pass leaves on a layer, for module extensions that users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from bpk.recording import engine

INPUT_NAMES = tuple(f"input{k}" for k in range(16))
"""Under which names the inputs of a layer are left on it."""

NAMES = frozenset(("output", *INPUT_NAMES))
"""Under which names anything is."""


def nothing() -> None:
    """What a copy gets in place of something that belongs to one forward pass."""


class Stored(Tensor):
    """A tensor that a forward pass has left on a layer: copies of the layer, and files, do without."""

    __torch_function__ = engine.no_torch_function  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def is_own(module: nn.Module, name: str) -> bool:
    """Whether a module has something of its own under a name, which is not left there by `store_on`."""
    fields = module.__dict__
    if name in fields:
        return not isinstance(fields[name], Tensor) or type(fields[name]) is Tensor
    return name in module._parameters or name in module._buffers or name in module._modules


def store_on(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
    """Leave aliases of inputs and output on a module (`input0`, ..., `output`), without a graph; returns the last one.

    What the module has of its own under such a name stays.
    """
    fields = module.__dict__
    for name, x in (*zip(INPUT_NAMES, inputs, strict=False), ("output", output)):
        alias = x.detach()
        if type(alias) is Tensor:
            alias.__class__ = Stored  # half as long as making it one
        if type(fields.get(name)) is Stored or not is_own(module, name):
            fields[name] = alias
    return alias


def forget(module: nn.Module, output: Tensor | None = None) -> None:
    """Remove the tensors that `store_on` left on a module; if an `output` is given, only those that came with it."""
    fields = module.__dict__
    if output is not None and fields.get("output") is not output and not is_own(module, "output"):
        return
    for name in NAMES & fields.keys():
        if isinstance(fields[name], Tensor) and type(fields[name]) is not Tensor:  # left there, see `is_own`
            del fields[name]
