"""Nested arguments and results: tuples, lists, mappings and dataclasses that hold tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, MutableMapping):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([vars(value)[field.name] for field in dataclasses.fields(value)])


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, part in value.items():
            made[key] = with_tensors(part, change)
        return made
    if isinstance(value, (tuple, list)):
        parts = [with_tensors(part, change) for part in value]
        if isinstance(value, list):
            return parts
        return tuple(parts) if type(value) is tuple else type(value)(*parts)  # a named tuple
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: with_tensors(vars(value)[field.name], change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def in_words(value: Any) -> str:
    """Its type, shapes and dtypes: `a tensor of shape [3, 4] (float32)`."""
    found = [f"{list(x.shape)} ({str(x.dtype).removeprefix('torch.')})" for x in tensors_of(value)]
    if isinstance(value, Tensor):
        return f"a tensor of shape {found[0]}"
    return f"{type(value).__name__} " + (f"with tensors of shape {', '.join(found)}" if found else "without tensors")
