"""Memory of convolutions: a switch that scripts for BackPACK set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def weight_jac_t_save_memory(save_memory: bool = True) -> Iterator[None]:
    """Accepted, and without effect: the choice that it stands for does not exist here.

    In BackPACK it selects a slower algorithm for weight gradients of convolutions that needs less memory. `bpk` works
    over a few samples at a time in one small buffer, whatever is asked: patches of the whole batch are never held.

    >>> with weight_jac_t_save_memory(save_memory=True):
    ...     pass
    """
    yield
