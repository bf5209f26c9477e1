"""How Kronecker factors of batches make those of all their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bpk.extensions.over_batches import Parts, Rows, Size, Sums
from bpk.fields.nearest_kronecker import product_of

NAMES = (("G", "A"), ("A transposed", "G transposed"))
"""What factors are called while they add up; the second ones are those of uses that see the parameter transposed."""


def named(terms: list[list[Tensor]], input_first: bool) -> Parts:
    """Factors of one or two products by name, in their order."""
    found = [pair for names, factors in zip(NAMES, terms, strict=False) for pair in zip(names, factors, strict=False)]
    return dict(reversed(found) if input_first else found)


class Factors(Sums):
    """`G` is a sum over samples that carries the loss scaling, `A` a mean over samples: each adds up by itself.

    Parts are in the order of the factors. Where some uses see the parameter transposed, the nearest Kronecker product
    is taken of the sums.
    """

    symmetric = True

    def weight(self, name: str, size: Size) -> float:
        return size.samples if name.startswith("A") else size.weight(1)

    def whole(self, total: Parts, size: Size) -> list[Tensor]:
        known = {name: x / self.weight(name, size) for name, x in total.items()}
        order = list(known)
        terms = [[known[name] for name in names if name in known] for names in NAMES]
        return product_of([term for term in terms if term], order.index("G") > 0 and order[-1] == "G")


class FactorRows(Rows):
    """Factors of each sample `[N, G, G]` and `[N, A, A]`: `G` carries the loss scaling. Parts are `named` by place."""

    @staticmethod
    def named(factors: Sequence[Tensor], input_first: bool) -> Parts:
        """Factors by place and kind: `"0G"`, `"1A"`."""
        kinds = ("A", "G") if input_first and len(factors) > 1 else ("G", "A")
        return {f"{number}{kinds[number]}": factor for number, factor in enumerate(factors)}

    def power_of(self, name: str) -> float:
        return float(name.endswith("G"))

    def field(self, parts: Mapping[str, Any]) -> list[Any]:
        return [parts[name] for name in sorted(parts)]
