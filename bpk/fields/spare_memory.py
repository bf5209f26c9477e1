"""The memory of a field that is about to be overwritten, where nobody can see that it is used again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from bpk.recording import engine

T = TypeVar("T")


def handles(tensor: Tensor) -> tuple[int, ...]:
    """What refers to a tensor and to its storage: objects of Python, and handles within torch."""
    storage = tensor.untyped_storage()
    within = engine.handles_inside(tensor)
    return sys.getrefcount(tensor), sys.getrefcount(storage), *within


def references(thing: object) -> tuple[int, ...]:
    """How many there are to an object of Python."""
    return (sys.getrefcount(thing),)


def of_argument(count: Callable[[T], tuple[int, ...]], thing: T) -> tuple[int, ...]:
    """What is counted in a function whose argument this is."""
    return count(thing)


def of_one_variable(count: Callable[[T], tuple[int, ...]], make: Callable[[], T]) -> tuple[int, ...]:
    """The same, if a variable of the caller is the only thing that refers to the argument."""
    variable = make()
    return of_argument(count, variable)


ALONE = of_one_variable(handles, lambda: torch.empty(1, device="cpu"))
"""Versions of Python differ: a reference more or less is counted for each function that is called."""

ALONE_AS_LIST = of_one_variable(references, list)

WORTH = 1 << 16
"""How many numbers a field has whose memory is worth the question: small blocks are handed out again anyway."""


def spare_memory(tensor: object) -> Tensor | None:
    """The memory of a tensor as a flat tensor, if it would be freed with the caller's variable.

    Nothing else refers to tensor or storage then. The memory is torch's own (that of arrays and files cannot be
    resized), and no other process has it. Only on processors: elsewhere, work under way may still read it.
    """
    if (
        not isinstance(tensor, Tensor)
        or tensor.numel() < WORTH
        or tensor.requires_grad
        or tensor.layout is not torch.strided
    ):
        return None
    if tensor.device.type != "cpu" or any(n > alone for n, alone in zip(handles(tensor), ALONE, strict=True)):
        return None
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    if not whole or not storage.resizable() or storage.is_shared() or tensor.is_pinned():
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (tensor.numel(),), (1,))


def spare_memories(tensors: object) -> list[Tensor]:
    """The same of all tensors in a list, which is emptied, if nothing refers to the list but the caller's variable."""
    found: list[Tensor] = []
    while type(tensors) is list and tensors and references(tensors) <= ALONE_AS_LIST:
        tensor = tensors.pop()
        spare = spare_memory(tensor)
        if spare is not None:
            found.append(spare)
    return found
