"""Which fields of batches make that of a data set, and how."""

from __future__ import annotations

from collections.abc import Iterable

from bpk.context import check_extension
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import OverBatches, Rows
from bpk.jacobians.core.errors import explain


def combinations(
    extensions: Iterable[BackpropExtension], batch_averages: bool
) -> tuple[dict[str, OverBatches], dict[str, Rows]]:
    """How fields that add up, and rows of samples, are made of those of batches; refuses fields that are not."""
    sums: dict[str, OverBatches] = {}
    rows: dict[str, Rows] = {}
    for extension in extensions:
        check_extension(extension)
        rule, reason, do = extension.over_batches, "", "leave it out, and add up in a loop over the loader yourself."
        if extension.subsampling is not None:
            reason, do = (
                "subsampling= chooses samples of a batch",
                "pass a loader of torch.utils.data.Subset(dataset, ...).",
            )
        elif extension.has_module_extensions:
            reason = "nothing tells how what a hand-written module extension returns adds up"
        elif not isinstance(rule, OverBatches):
            reason, _, way_out = (rule or f"{type(extension).__name__} does not declare over_batches").partition("\n")
            do = way_out or do
        elif rule.approximates and not batch_averages:
            reason, do = rule.approximates, "use KFLR or KFAC, or batch_averages=True for the batches' weighted mean."
        if reason:
            raise ValueError(explain(f"{extension} cannot be accumulated over batches.", f"{reason}.", do))
        if isinstance(rule, Rows):
            rows[extension.savefield] = rule
        elif isinstance(rule, OverBatches):
            sums[extension.savefield] = rule
    return sums, rows
