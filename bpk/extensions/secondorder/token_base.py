"""Base class of quantities of single tokens."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.over_batches import Parts, Rows, Size
from bpk.extensions.secondorder.base import SecondOrderBackpropExtension
from bpk.fields.tokens import together


class TokenRows(Rows):
    """Rows `[N, T, ...]` of samples: those of shorter batches get zeros at the end, as in one large batch."""

    def merge(self, total: Parts, of_total: Size, other: Parts, of_other: Size) -> Parts:
        pairs = {name: (x, other[name]) for name, x in total.items()}
        return {name: cat_padded(left, right) for name, (left, right) in pairs.items()}


class TokenExtension(SecondOrderBackpropExtension):
    """An extension that listens to the columns of single tokens, starting at the loss.

    `T` counts the terms that the loss adds up for a sample: rows of the prediction, and positions in each. Of samples
    with fewer tokens than others, the last rows are zero.
    """

    combines = True

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return together(before, value)


def cat_padded(left: Tensor, right: Tensor) -> Tensor:
    """Rows `[N, T, ...]` one after the other, with as many tokens as those that have more."""
    longest = max(left.shape[1], right.shape[1])
    found = left.new_zeros(len(left) + len(right), longest, *left.shape[2:])
    found[: len(left), : left.shape[1]] = left
    found[len(left) :, : right.shape[1]] = right
    return found
