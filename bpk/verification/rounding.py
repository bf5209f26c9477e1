"""How far rounding alone may move a reference: what is left where large numbers cancel is made of their roundings.

The gradient of a bias before a normalisation is zero, as a sum of numbers that are not. No size of the result tells how
large they are, so that it is measured: results of all operations are moved a little, entry by entry, in first and
second order. A wrong number is not hidden so: what is allowed for is `atol` of what a result is made of, wherever it
cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.engine import EachOperation
from bpk.verification.reference import Reference

DRAWS = 3
"""How often results are moved: that a single number comes out where it was is no chance then."""


class Moving(EachOperation):
    """All that is computed from other numbers is off by so much (in proportion); views and new tensors are not."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size, self.generator = size, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or not any(isinstance(x, Tensor) for x in args):
            return result
        several = isinstance(result, tuple | list)
        moved = [self.moved(x, any(x is given for given in args)) for x in (result if several else (result,))]
        return type(result)(moved) if several else moved[0]

    def moved(self, x: Any, in_place: bool) -> Any:
        """Each entry a little larger or smaller."""
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x
        drawn = torch.randn(x.shape, generator=self.generator, dtype=torch.float64, device="cpu")
        other = x * (1 + self.size * drawn).to(x)
        return x.copy_(other) if in_place else other


@contextmanager
def moved(reference: Reference, seed: int) -> Iterator[float]:
    """Inside, derivatives are computed again, with operations whose results are off by so much of each entry."""
    size, here = reference.rounding**0.5, dict(vars(reference))
    for name in ("columns_of_all", "pulled", "noise"):
        vars(reference).pop(name, None)
    reference.known, reference._live = {}, {}
    try:
        with Moving(size, seed):
            yield size
    finally:
        vars(reference).clear()
        vars(reference).update(here)
