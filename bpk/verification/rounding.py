"""How far rounding alone may move a reference: what is left where large numbers cancel is made of their roundings.

The gradient of a bias before a normalisation is zero, as a sum of numbers that are not. No size of the result tells how
large they are, so that it is measured: every gradient that travels through the graph is moved a little, entry by entry.
A wrong number is not hidden so: what is allowed for is `atol` of what a result is made of, wherever it cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bpk.jacobians.second_order.graph import between
from bpk.verification.reference import Reference

DRAWS = 3
"""How often results are moved: that a single number comes out where it was is no chance then."""


@contextmanager
def moved(reference: Reference, seed: int) -> Iterator[float]:
    """Inside, all is computed again, with gradients that are off at every node by so much of each of their entries."""
    size, generator, here = reference.rounding**0.5, torch.Generator().manual_seed(seed), dict(vars(reference))

    def move(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(g if g is None else off(g, size, generator) for g in gradients)

    ends = [split.pred.grad_fn for split in (reference.whole, here.get("split", reference.whole))]
    nodes = dict.fromkeys(node for end in ends if end is not None for node in between(end, lambda _: False))
    handles = [node.register_prehook(move) for node in nodes]
    for name in ("columns_of_all", "pulled", "noise"):
        vars(reference).pop(name, None)
    reference.known, reference._live = {}, {}
    try:
        yield size
    finally:
        for handle in handles:
            handle.remove()
        vars(reference).clear()
        vars(reference).update(here)


def off(x: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Each entry a little larger or smaller."""
    if x.layout is not torch.strided or not x.is_floating_point():
        return x
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    return x * (1 + size * drawn).to(x)
