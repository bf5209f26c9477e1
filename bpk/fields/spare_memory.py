"""The memory of a field that is about to be overwritten, where nobody can see that it is used again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from bpk.recording import engine

T = TypeVar("T")
N = TypeVar("N")


def handles(tensor: Tensor) -> tuple[int, ...]:
    """What refers to a tensor and to its storage: objects of Python, and handles within torch."""
    storage = tensor.untyped_storage()
    within = engine.handles_inside(tensor)
    return sys.getrefcount(tensor), sys.getrefcount(storage), *within


def of_argument(tensor: Tensor) -> tuple[int, ...]:
    """The same, in a function whose argument this is."""
    return handles(tensor)


def of_one_variable(count: Callable[[T], N], make: Callable[[], T]) -> N:
    """What is counted where a variable is the only thing that refers to something."""
    variable = make()
    return count(variable)


ALONE = of_one_variable(of_argument, lambda: torch.empty(1, device="cpu"))
"""Versions of Python differ: a reference more or less is counted for each function that is called."""

ALONE_AS_LIST = of_one_variable(sys.getrefcount, list)

WORTH = 1 << 16
"""How many numbers a field has whose memory is worth the question: small blocks are handed out again anyway."""


def spare_memory(tensor: Tensor) -> Tensor | None:
    """The memory of a tensor as a flat tensor, if it would be freed with the caller's variable.

    Nothing else refers to tensor or storage then. The memory is torch's own (that of arrays and files cannot be
    resized), and no other process has it. Only on processors: elsewhere, work under way may still read it.
    """
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    if any(n > alone for n, alone in zip(handles(tensor), ALONE, strict=True)):
        return None
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    if not whole or not storage.resizable() or storage.is_shared() or tensor.is_pinned():
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (tensor.numel(),), (1,))


def spare_memories(fields: dict[str, Any], name: str) -> list[Tensor]:
    """Take away the field of an earlier pass: the memory of its tensors, where it is large.

    It is one, a list of them, or by name what adds up over batches. Where a graph is built, nothing is written into
    memory that exists.
    """
    field, found = fields.pop(name, None), list[Tensor]()
    if type(field) not in (list, dict):
        field = [field]
    elif sys.getrefcount(field) > ALONE_AS_LIST:  # of a dictionary there are as many
        return found
    if torch.is_grad_enabled():
        return found
    while field:
        tensor = field.popitem()[1] if type(field) is dict else field.pop()
        if isinstance(tensor, Tensor) and tensor.numel() >= WORTH:
            spare = spare_memory(tensor)
            if spare is not None:
                found.append(spare)
    return found
