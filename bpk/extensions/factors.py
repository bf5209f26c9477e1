"""How Kronecker factors of batches make those of all their samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bpk.extensions.over_batches import Parts, Rows, Size, Sums
from bpk.fields.nearest_kronecker import product_of
from bpk.jacobians.core.errors import value_error

INPUT = "A"
NAMES = (("G", INPUT), (f"{INPUT} transposed", "G transposed"))
"""What factors are called while they add up; the second ones are those of uses that see the parameter transposed."""


def named(terms: list[list[Tensor]], input_first: bool) -> Parts:
    """Factors of one or two products by name, in their order."""
    found = [pair for names, factors in zip(NAMES, terms, strict=False) for pair in zip(names, factors, strict=False)]
    return dict(reversed(found) if input_first else found)


def require_form(param: str, before: Iterable[Tensor], now: Iterable[Tensor]) -> None:
    """Refuse factors that have another form than those of batches before: nothing adds up."""
    known, found = ([x.shape for x in factors] for factors in (before, now))
    if known != found:
        shapes, earlier = list(map(list, found)), list(map(list, known))
        raise value_error(
            f"The factors of parameter {param} have the shapes {shapes} in this batch, and had {earlier} before.",
            "the layer sees samples in another way: in a batch of one, the rows of an embedding of positions are "
            "all that sample's; otherwise samples share them, and the only factor is the parameter's whole block.",
            "give each batch two samples or more (drop_last=True of a DataLoader), or freeze the parameter.",
        )


class Factors(Sums):
    """`G` is a sum over samples that carries the loss scaling, `A` a mean over samples: each adds up by itself.

    Parts are in the order of the factors. Where some uses see the parameter transposed, the nearest Kronecker product
    is taken of the sums.
    """

    symmetric = True

    def weight(self, name: str, size: Size) -> float:
        return size.samples if name.startswith(INPUT) else size.weight(1)

    def require_form(self, param: str, total: Parts, part: Parts) -> None:
        """Refuse parts that are not among those of the total, or lack the input's: uses may be missing in a batch."""
        same = part.keys() <= total.keys() and (INPUT in total) == (INPUT in part)
        require_form(param, [total[name] for name in part] if same else total.values(), part.values())

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
