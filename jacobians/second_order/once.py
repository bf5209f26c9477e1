"""What autograd says of functions that it can differentiate once only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bpk.jacobians.core.errors import UnsupportedLayer

ONCE = (
    "is not implemented",
    "once_differentiable",
    "double backward",
    "cannot reshape tensor of 0 elements",
    "modified by an inplace operation",
    "don't support automatic differentiation",
    "output_padding is not supported",
)
"""How autograd says that a function can be differentiated once only."""


def only_once(error: RuntimeError) -> str | None:
    """The words in which autograd says that it can differentiate a function only once (`None`: another error)."""
    reason = str(error).splitlines()[0]
    return None if isinstance(error, UnsupportedLayer) or not any(hint in reason for hint in ONCE) else reason


@contextmanager
def refused_as(refusal: Callable[[str], UnsupportedLayer]) -> Iterator[None]:
    """Where autograd can differentiate a function only once: what to say in place of its error, for its reason."""
    try:
        yield
    except RuntimeError as error:
        reason = only_once(error)
        if reason is None:
            raise
        raise refusal(reason) from error
