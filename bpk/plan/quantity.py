"""What the plan, and all below extensions, know of an extension."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from torch import nn

FAIL_ERROR = "ERROR"
"""A layer that the extension does not know raises."""
FAIL_WARN = "WARN"
"""A layer that the extension does not know, and that has parameters, causes a warning."""
FAIL_SILENT = "SILENT"
"""A layer that the extension does not know is passed over."""

Takes = Literal["columns", "squares", "factors"]
"""Of what a value is made: of sums of squares of columns alone, of their Kronecker factors alone, or of any columns.

Squares and factors of the last layer may be known without columns (`bpk.sweeps.columns.closed_form`).
"""


class PassListener(Protocol):
    """Is told of the backward passes in which a quantity is computed."""

    def begin(self) -> None:
        """A pass has come to a recorded call, and not yet to a parameter."""

    def end(self, noted: Any) -> None:
        """A pass has saved its fields; `noted` is how large its batch was (`bpk.fields.local.Noted`)."""


class Quantity(Protocol):
    """An extension (`bpk.extensions.backprop_extension.BackpropExtension`), as a protocol."""

    savefield: str
    fail_mode: str
    subsampling: tuple[int, ...] | None
    second_order: bool
    combines: bool
    stacks: bool
    sums_rows: bool
    sums_samples: bool
    linear_in_terms: bool
    joins_calls: bool
    needs_rows: bool
    needs_samples: bool
    needs_gradient: bool
    needs_independence: bool
    needs_total: bool
    joins_parameters: bool
    adds_field: bool
    linear: bool

    @property
    def takes(self) -> Takes:
        """Of what the value is made."""

    @property
    def sample_axis(self) -> int | None:
        """Along which axis of the field samples are (`None`: it is no tensor with a row for each of them)."""

    @property
    def works_by_rules(self) -> bool:
        """Whether the rule of a layer is enough, so that no module extension is needed for it."""

    @property
    def has_module_extensions(self) -> bool:
        """Whether any layer class has a hand-written module extension."""

    def module_extension(self, module: nn.Module) -> Any:
        """The hand-written module extension for a module, or `None`."""

    def sweep(self) -> Any:
        """What the extension listens to (`None`: it works through module extensions only)."""

    def value(self, uses: Any) -> Any:
        """The value of the field, from what the sweep has brought to the parameter."""

    def share(self, uses: Any) -> Any:
        """What a parameter adds to the total of the pass."""

    def of_total(self, total: Any, n: int) -> Any:
        """What values use of the total, in a batch of `n` samples."""

    def statistic(self, uses: Any) -> Any:
        """What of a batch adds up over batches."""

    def unscaled(self, uses: Any) -> tuple[Any, Any]:
        """The value for a loss without the factor `uses.loss_scale`, and what adds up of it."""

    def combine(self, before: Any, value: Any) -> Any:
        """The value of all columns, from that of the first ones and that of the others."""


def is_of_batch(extension: Quantity) -> bool:
    """Whether an extension is a sum that exists where samples mix: over all terms of the loss, or over some of them."""
    return extension.sums_samples and (extension.subsampling is None or extension.linear_in_terms)
