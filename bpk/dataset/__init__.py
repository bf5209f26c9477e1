"""From a batch to a data set: quantities of all samples that a loader gives, as one large batch would give them."""

from bpk.dataset.accumulate import accumulate
from bpk.dataset.result import Accumulated

__all__ = ["Accumulated", "accumulate"]
