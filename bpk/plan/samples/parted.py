"""What users are told, once for each loss, where losses see different rows of what the model was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakSet

from torch import Tensor, nn

from bpk.plan.samples.cautions import tell
from bpk.recording.record import Record

PARTED: WeakSet[nn.Module] = WeakSet()
"""Losses whose user has been told that others see other rows."""


def caution_parts(losses: Mapping[Record, tuple[Sequence[Record], Mapping[Record, Tensor]]]) -> None:
    """Tell the user once where losses take different rows that the model was given for the same samples.

    That is right for several views of a sample in one batch, and not for parts of a batch; nothing tells which. Of each
    loss there are the calls behind it, from the last one to the first, and the samples of rows where these differ.
    """
    first: dict[Record, Tensor] = {}
    start: Tensor | None = None
    for loss, (above, rows) in losses.items():
        data = next((record.inputs[0] for record in reversed(above) if record.reads_data), None)
        start = data if start is None else start
        if data is not None and start is not None and are_parts(start, data) and loss.module not in PARTED:
            tell_of_parts(loss, f"'{loss.path}' sees other rows than a loss before, of the same tensor.")
            continue
        below = [r for r in above if r in rows and r.given and r.given[0][:1] == rows[r].shape]
        if not below or loss.module in PARTED:
            continue
        samples, known = rows[below[-1]], first.setdefault(below[-1], rows[below[-1]])
        if known is samples or bool(((samples >= 0) & (known >= 0)).any()):
            continue
        of = f"of the {len(samples)} that the model was given"
        tell_of_parts(loss, f"'{loss.path}' sees other rows than a loss before, {of}.")


def tell_of_parts(loss: Record, what: str) -> None:
    """Tell the user of losses that see different rows."""
    tell(
        PARTED,
        loss,
        what,
        "sample k of one loss counts as sample k of the other, as for two views of one sample, so that what belongs to "
        "a sample is a sum over several rows.",
        "if they are different samples, give all rows to one loss (to weight them: a loss module of your own), or use "
        "one backward pass for each loss.",
    )


def are_parts(one: Tensor, other: Tensor) -> bool:
    """Whether two views of a tensor are different rows of it: `x[:2]` and `x[2:]`, and not `x[:, 0]` and `x[:, 1]`."""
    if one.untyped_storage() is not other.untyped_storage() or one.stride() != other.stride() or not one.dim():
        return False
    step, between = one.stride(0), other.storage_offset() - one.storage_offset()
    if not step or between % step:
        return False
    rows = between // step
    return rows >= len(one) or -rows >= len(other)
