"""Nested arguments and results: tuples, lists, dictionaries and dataclasses that hold tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """A place in nested arguments. Those of a step number inputs of the module, its parameters, and earlier results."""

    index: int


def tensors_in(value: Any, around: tuple[Any, ...] = ()) -> list[Tensor]:
    """All tensors, in order (`around` are the instances of dataclasses that the value is in: one may refer to itself).

    >>> tensors_in(({"x": Tensor([1.0])}, [2, Tensor([3.0])]))
    [tensor([1.]), tensor([3.])]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in tensors_in(part, around)]
    if isinstance(value, MutableMapping):
        return tensors_in(list(value.values()), around)
    if is_instance(value) and not is_in(value, around):
        return tensors_in(list(held_by(value).values()), (*around, value))
    return []


def mapped(value: Any, change: Callable[[Any], Any], around: tuple[Any, ...] = ()) -> Any:
    """The same structure (slices, too) with all that it holds changed; types stay, also those with attributes.

    >>> mapped({"x": (1, [2])}, lambda part: part + 1)
    {'x': (2, [3])}
    """
    if isinstance(value, MutableMapping):
        parts = {name: mapped(part, change, around) for name, part in value.items()}
        try:
            made = copy.copy(value)
        except KeyError:  # Python 3.10 asks for `__getstate__`, and where entries are attributes, for one of that name
            made = type(value)()
        try:
            for name, part in parts.items():
                made[name] = part
        except TypeError:  # one that cannot be changed, such as those of `torch.fx`
            return parts
        return made
    if isinstance(value, slice):
        return slice(*(mapped(part, change, around) for part in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        found = [mapped(part, change, around) for part in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)  # a named tuple, or others
    if is_instance(value) and not isinstance(value, Slot) and not is_in(value, around):
        copied = copy.copy(value)
        for name, part in held_by(value).items():
            object.__setattr__(copied, name, mapped(part, change, (*around, value)))  # a frozen one, too
        return copied
    return change(value)


def fill(template: Any, known: Sequence[Any]) -> Any:
    """Nested arguments, with what is known in their slots."""
    return mapped(template, lambda part: known[part.index] if isinstance(part, Slot) else part)


def substitute(value: Any, changed: Mapping[int, Tensor]) -> Any:
    """The same structure with some tensors replaced, by their `id`."""
    return mapped(value, lambda part: changed.get(id(part), part))


def is_instance(value: Any) -> bool:
    """Whether it is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_in(value: Any, around: tuple[Any, ...]) -> bool:
    """Whether it is one of these."""
    return any(value is other for other in around)


def held_by(value: Any) -> dict[str, Any]:
    """What an instance of a dataclass holds."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
