"""The strategies of Hessian backpropagation."""

from __future__ import annotations

from enum import Enum
from reprlib import repr
from typing import Any, TypeVar

Member = TypeVar("Member", bound=Enum)


class LossHessianStrategy(Enum):
    """How the loss Hessian is represented at the start."""

    EXACT = "exact"
    SAMPLING = "sampling"
    SUM = "sum"


class BackpropStrategy(Enum):
    """What travels backwards: a square root, or a matrix averaged over the batch."""

    SQRT = "sqrt"
    BATCH_AVERAGE = "average"


class ExpectationApproximation(Enum):
    """How the expectation of a Kronecker product is split into factors."""

    BOTEV_MARTENS = "E[a a^T] (x) E[g g^T]"


def member(option: str, kind: type[Member], given: Any) -> Member:
    """One of an enumeration, also by its value; anything else would be taken for the other way."""
    try:
        return kind(given)
    except ValueError as error:
        known = ", ".join(f"{kind.__name__}.{one.name}" for one in kind)
        raise ValueError(f"{option} must be one of {known}, got {repr(given)}.") from error
