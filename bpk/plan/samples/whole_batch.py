"""Where samples mix: the whole batch as one sample, for quantities that are sums over the batch.

The columns of a loss are those of single samples. A layer that mixes samples (BatchNorm in training mode) spreads each
of them over the batch, so that none of what is beyond belongs to a sample. Sums over the batch exist all the same:
`diag(J^T H J)` with the Jacobian `J` of all predictions. If all rows are those of one sample, columns are written out
row by row at the loss, rows of a parameter are summed before they are squared, and cross terms are right. Calls that
mix are left to autograd, whose products are those of the batch.

Sub-sampling means the terms of the loss that belong to the chosen samples, as functions of the whole batch:
`sum_n J_n^T H_n J_n` with the Jacobian `J_n` of prediction `n`. Where samples are independent, this is the sum over
what belongs to them alone; and everywhere the sum over all single samples is that of the batch.

A loss that couples samples has one Hessian for the whole batch, which its rule sees as one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.by_autograd import COUPLES
from bpk.jacobians.losses.coupled import CoupledLoss
from bpk.jacobians.losses.loss import AutodiffLoss
from bpk.plan.quantity import Quantity, is_of_batch
from bpk.plan.samples.hypotheses import has_no_axis
from bpk.plan.samples.placement import Placement, is_stuck, place
from bpk.plan.sources import Sources
from bpk.plan.support import require_support
from bpk.plan.survey import mixes
from bpk.recording.context.told import Told
from bpk.recording.record import Record


def place_or_merge(
    roots: Iterable[Record],
    sources: Sources,
    extensions: Sequence[Quantity],
    has_module_extension: Callable[[Record], bool],
    told: Told | None,
) -> tuple[dict[Record, Placement], bool]:
    """`place`; where samples mix and all of second order are sums over the batch, merge them, behind all losses.

    Returns what was found (for first-order extensions, where samples are merged), and whether they are merged.
    """
    second = [e for e in extensions if e.second_order]
    independent = bool([e for e in extensions if e.needs_independence])
    find = partial(place, has_module_extension=has_module_extension, independent=independent, told=told)
    if [root for root in roots if not root.is_loss] or not may_merge(second):
        return {root: find(root, sources, bool(second)) for root in roots}, False
    mixed = {r: None for root in roots for r in sources.upstream(root) if mixes(r) and not has_module_extension(r)}
    if not mixed and not any(root.whole for root in roots):
        twice = bool([e for e in second if not e.linear_in_terms])  # not made of columns of the loss alone
        try:
            return {root: find(root, sources, True, twice=twice) for root in roots}, False
        except UnsupportedLayer:  # functions mix samples: rows cannot be told apart
            pass
    sampled = [e for e in second if e.subsampling is not None]
    for root in roots if sampled else ():
        require_rows(root, sources.upstream(root), sampled[0])
    return {root: merge(root, sources, extensions, has_module_extension, mixed, told) for root in roots}, True


def merge(
    root: Record,
    sources: Sources,
    extensions: Sequence[Quantity],
    has_module_extension: Callable[[Record], bool],
    mixed: Iterable[Record],
    told: Told | None,
) -> Placement:
    """Leave to autograd what mixes samples, or has no rule."""
    first = [e for e in extensions if not e.second_order]
    for record in mixed:
        for extension in first:  # the user is told what they get
            require_support(extension, record, lambda _: True)
    independent = any(e.needs_independence for e in first)
    found = Placement(root, sources, sources.upstream(root), 1)
    if first:
        with rows_seen(root):
            found = place(root, sources, False, has_module_extension, independent, told=told)
    left = [r for r in found.above if r.rule is None or mixes(r) or is_stuck(r) or has_no_axis(r)]
    found.leave([r for r in left if not has_module_extension(r)])
    return found


def see_whole_batch(loss: Record, extensions: Iterable[Quantity]) -> None:
    """Take a loss that couples samples for one of a single sample, the batch, if second order adds up the batch."""
    if isinstance(loss.rule, CoupledLoss):  # for another pass
        see_by(loss, loss.rule.rule)
    rule = loss.rule
    if not isinstance(rule, AutodiffLoss) or not loss.aligned or loss.recomputed is not None or loss.problem:
        return
    second = [e for e in extensions if e.second_order]
    if not may_merge(second) or any(e.subsampling is not None for e in second):
        return
    if rule.obstacle(loss.call()) == COUPLES:
        see_by(loss, CoupledLoss.of(rule))


def see_by(loss: Record, rule: AutodiffLoss) -> None:
    """Let a rule see a loss: the whole batch as one sample, or rows as samples."""
    loss.rule, loss.cached = rule, None
    loss.see_whole(isinstance(rule, CoupledLoss))


@contextmanager
def rows_seen(loss: Record) -> Iterator[None]:
    """Rows are samples, as they are for first order."""
    rule = loss.rule
    if not isinstance(rule, CoupledLoss):
        yield
        return
    see_by(loss, rule.rule)
    yield
    see_by(loss, rule)


def may_merge(second_order: Sequence[Quantity]) -> bool:
    """Whether every second-order extension is a sum over the whole batch (and there are some)."""
    return bool(second_order) and all(map(is_of_batch, second_order))


def require_rows(root: Record, above: Iterable[Record], extension: Quantity) -> None:
    """Refuse sub-sampling where the rows of the loss need not be the samples: what mixes hides whose they are."""
    given = {record.given[0] for record in above if record.given}
    if any(root.batch_size not in shape[:2] for shape in given):
        raise UnsupportedLayer(
            f"{extension} cannot look at some samples only behind {root.where}.",
            f"samples mix, so that nothing tells which sample each of its {root.batch_size} rows belongs to.",
            "leave out subsampling=, or give the loss one row for each sample ([N, C, T]).",
        )
