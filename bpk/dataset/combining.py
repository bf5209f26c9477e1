"""Which fields of batches make that of a data set, and how."""

from __future__ import annotations

from collections.abc import Iterable

from bpk.context import check_extension
from bpk.distributed.fields import rule_of
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import OverBatches, Rows
from bpk.jacobians.core.errors import value_error


def combinations(
    extensions: Iterable[BackpropExtension], batch_averages: bool
) -> tuple[dict[str, OverBatches], dict[str, Rows]]:
    """How fields that add up, and rows of samples, are made of those of batches; refuses fields that are not."""
    sums: dict[str, OverBatches] = {}
    rows: dict[str, Rows] = {}
    for extension in extensions:
        check_extension(extension)
        refused = "{} cannot be accumulated over batches."
        if extension.subsampling is not None:
            do = "pass a loader of torch.utils.data.Subset(dataset, ...)."
            raise value_error(refused.format(extension), "subsampling= chooses samples of a batch.", do)
        do = "leave it out, and add up in a loop over the loader yourself."
        rule = rule_of(extension, batch_averages, refused, do)
        if isinstance(rule, Rows):
            rows[extension.savefield] = rule
        else:
            sums[extension.savefield] = rule
    return sums, rows
