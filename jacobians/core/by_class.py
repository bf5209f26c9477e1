"""What is known of classes, for as long as these live."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

V = TypeVar("V")


class ByClass(Generic[V]):
    """Values by class: as a `WeakKeyDictionary`, for look-ups in each call of a layer, in half the time."""

    def __init__(self) -> None:
        self._known: dict[ref[type], V] = {}

    def get(self, cls: type) -> V | None:
        """What is known of a class."""
        return self._known.get(ref(cls))

    def __setitem__(self, cls: type, value: V) -> None:
        self._known[ref(cls, self._forget)] = value

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget all classes."""
        self._known.clear()

    def _forget(self, cls: ref[type]) -> None:
        """A class is gone."""
        self._known.pop(cls, None)
