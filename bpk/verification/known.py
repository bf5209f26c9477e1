"""Values that are computed once, and kept with the object that they are of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Knows(Protocol):
    """An object that keeps values by what was asked for."""

    known: dict[Hashable, Any]


K = TypeVar("K", bound=Knows)
P = ParamSpec("P")
T = TypeVar("T")


def once(compute: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """A method whose value is computed once for the same names and samples."""

    @wraps(compute)
    def get(self: K, *args: P.args, **kwargs: P.kwargs) -> T:
        key = compute.__name__, *args, *kwargs.items()
        if key not in self.known:
            self.known[key] = compute(self, *args, **kwargs)
        return self.known[key]

    return get
