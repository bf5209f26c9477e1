"""Base class of quantities of single tokens."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.secondorder.base import OfSamples
from bpk.fields.tokens import together


class TokenExtension(OfSamples):
    """An extension that listens to the columns of single tokens, starting at the loss.

    `T` counts the terms that the loss adds up for a sample: rows of the prediction, and positions in each.
    """

    combines = True

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return together(before, value)
