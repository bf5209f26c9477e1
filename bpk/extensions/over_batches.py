"""How the fields of batches make the field of all their samples, as one large batch would give it.

A loss that takes the mean divides the sum of its terms by a divisor: the number of samples or entries, or the summed
weights of the targets that count. What is a sum over samples of a power of the loss is therefore added up for the
*summed* loss, `value * divisor**power`, and divided by the power of the summed divisors in the end. Losses that sum
have no divisor.

Each extension declares an object of these classes as its `over_batches`. Totals of batches, and of processes, are
merged in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.engine import add_to_all
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.numeric import wide

Parts = dict[str, Tensor]
"""What adds up, by name."""


@dataclass(frozen=True)
class Size:
    """How large a batch, or a set of batches, is: its samples, and the divisor of its loss (`None`: the loss sums).

    >>> Size(2, 2.0) + Size(3, 3.0)
    Size(samples=5, divisor=5.0)
    >>> Size(2, 4.0).weight(0.5), Size(2, None).weight(0.5)
    (2.0, 1.0)
    """

    samples: int
    divisor: float | None

    def __add__(self, other: Size) -> Size:
        if self.divisor is None or other.divisor is None:
            assert self.divisor is other.divisor
            return Size(self.samples + other.samples, None)
        return Size(self.samples + other.samples, self.divisor + other.divisor)

    def weight(self, power: float) -> float:
        """What a power of the loss is to be multiplied with to be that of the summed loss."""
        return 1.0 if self.divisor is None else float(self.divisor**power)


class OverBatches(ABC):
    """How an extension's statistics of batches are merged. Totals are those of the summed loss."""

    power: float = 1.0
    """The power of the loss that statistics are proportional to."""

    approximates: str = ""
    """Why the result is not that of one large batch, where it is not: it is computed for those who ask for it."""

    symmetric = False
    """Whether square matrices among the parts are symmetric, so that one triangle is enough to send."""

    leading: str | None = None
    """The part whose sum over processes `about` needs for the others, if there is one."""

    def require(self, *sizes: Size) -> None:
        """Refuse batches of these sizes, if their statistics would be others in one large batch. Default: none are."""

    def power_of(self, name: str) -> float:
        """The power of the loss that a part is proportional to."""
        return self.power

    def weight(self, name: str, size: Size) -> float:
        """What a part is multiplied with before it is added up, and divided by in the end."""
        return size.weight(self.power_of(name))

    def scaled(self, part: Parts, size: Size) -> Parts:
        """The statistic of one batch as a total, in memory of its own."""
        return {name: wide(x) * self.weight(name, size) for name, x in part.items()}

    @abstractmethod
    def merge(self, total: Parts, of_total: Size, other: Parts, of_other: Size) -> Parts:
        """The total of both, in the memory of the first."""

    @abstractmethod
    def whole(self, total: Parts, size: Size) -> Any:
        """The field of one batch with all samples."""

    def add(self, totals: dict[str, Parts], of_total: Size, parts: Mapping[str, Parts], size: Size) -> None:
        """Add the statistics of one more batch to totals, in the totals' memory; both by parameter."""
        for param, part in parts.items():
            totals[param] = self.merge(totals[param], of_total, self.scaled(part, size), size)

    def unscaled(self, part: Parts, scale: float) -> Parts:
        """The statistic of one batch for a loss that is so many times smaller."""
        return {name: wide(x) / self.weight(name, Size(1, scale)) for name, x in part.items()}

    def about(self, total: Parts, size: Size, mean: Tensor) -> Parts:
        """A total as sums over processes, given the mean over samples of the `leading` part of all of them."""
        return total


class Sums(OverBatches):
    """Sums over samples of something that is proportional to a `power` of the loss.

    >>> import torch
    >>> sums, batch = Sums(), {"weight": {"": torch.tensor([3.0])}}
    >>> totals = {"weight": sums.scaled(batch["weight"], Size(1, 1.0))}
    >>> sums.add(totals, Size(1, 1.0), batch, Size(3, 3.0))
    >>> sums.whole(totals["weight"], Size(4, 4.0))
    tensor([3.])
    """

    def __init__(self, power: float = 1.0, approximates: str = "") -> None:
        self.power = power
        self.approximates = approximates

    def merge(self, total: Parts, of_total: Size, other: Parts, of_other: Size) -> Parts:
        self.require_form("(in another process)", total, other)
        return {name: added(x, other[name]) for name, x in total.items()}

    def add(self, totals: dict[str, Parts], of_total: Size, parts: Mapping[str, Parts], size: Size) -> None:
        for param, part in parts.items():
            self.require_form(repr(param), totals[param], part)
        for name in dict.fromkeys(chain.from_iterable(parts.values())):
            here = {param: part[name] for param, part in parts.items() if name in part}
            ours, theirs, weight = [totals[param][name] for param in here], list(here.values()), self.weight(name, size)
            if {x.layout for x in (*ours, *theirs)} == {torch.strided}:
                add_to_all(ours, theirs, weight)
                continue
            for param, x in here.items():
                totals[param][name] = added(totals[param][name], x, weight)

    def require_form(self, param: str, total: Parts, part: Parts) -> None:
        """Refuse statistics of another shape than before: in a sum, an axis of length one would be repeated."""
        for name, x in part.items():
            if x.shape != (known := total[name].shape):
                raise value_error(
                    f"What adds up at parameter {param} has the shape {list(x.shape)} in this batch, and had "
                    f"{list(known)} before.",
                    "batches add up entry by entry: a field of each output wants equally many of them in all batches.",
                    "give all batches samples of one form (sequences of one length), or leave this extension out.",
                )

    def whole(self, total: Parts, size: Size) -> Any:
        return total[""] / self.weight("", size)


def added(total: Tensor, other: Tensor, factor: float = 1.0) -> Tensor:
    """`total + factor * other`, in the memory of the total (sparse matrices: of their common entries)."""
    if total.layout is not other.layout:
        total, other = total.to_dense(), other.to_dense()
    if total.is_sparse:
        return (total + other * factor).coalesce()
    return total.add_(other, alpha=factor)


@dataclass(frozen=True)
class Rows(OverBatches):
    """A row for each sample along an `axis`, proportional to a `power` of the loss: batches one after the other."""

    power: float = 1.0
    axis: int = 0

    def field(self, parts: Mapping[str, Any]) -> Any:
        """The field that has these parts."""
        (rows,) = parts.values()
        return rows

    def merge(self, total: Parts, of_total: Size, other: Parts, of_other: Size) -> Parts:
        return {name: torch.cat([x, other[name]], self.axis) for name, x in total.items()}

    def whole(self, total: Parts, size: Size) -> Any:
        return self.field({name: x / self.weight(name, size) for name, x in total.items()})
