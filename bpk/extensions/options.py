"""Options of extensions that make no sense, refused where they are given."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral
from reprlib import repr

from torch import Tensor

from bpk.jacobians.core.errors import counted, type_error, value_error


def require_options(extension: type, options: Iterable[str]) -> None:
    """Refuse options under a name that is none, with those that there are."""
    known = inspect.signature(extension).parameters
    if any(option.kind is option.VAR_KEYWORD for option in known.values()):
        return
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            raise type_error(
                f"{extension.__name__} has no option '{name}'.",
                f"it takes {', '.join(known)}.",
                f"did you mean '{close[0]}'?" if close else f"see help({extension.__name__}).",
            )


def checked_indices(subsampling: Sequence[int] | None, option: str = "subsampling") -> tuple[int, ...] | None:
    """Sample indices as a tuple; refuses negative and non-integer ones. `option` is what took them."""
    if subsampling is None:
        return None
    given = subsampling.tolist() if isinstance(subsampling, Tensor) else subsampling
    indices = tuple(given) if isinstance(given, Iterable) else (given,)
    whole = all(isinstance(i, Integral) and not isinstance(i, bool) and i >= 0 for i in indices)
    if not isinstance(given, Iterable) or not whole:
        raise value_error(
            f"{option}={subsampling!r} is not a list of sample indices.",
            "each index names one sample of the batch, from 0 to N - 1.",
            f"pass for example {option}=[0, 2, 5].",
        )
    return tuple(int(i) for i in indices)


def seeding(seed: int) -> int:
    """A seed as an int, of which numbers follow by its digits; or a clear refusal."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be a whole number, got {repr(seed)}.")
    return int(seed)


def limit(name: str, number: int | None) -> int | None:
    """A positive whole number, or `None`: there is no limit."""
    return None if number is None else positive(name, number)


def positive(name: str, number: int) -> int:
    """A positive whole number, or a clear refusal."""
    found = counted(number)
    if found is None:
        raise ValueError(f"{name} must be a whole number of at least 1, got {repr(number)}.")
    return found
