"""Diagonal residuals, which begin behind elementwise layers: how they pass the layers before without being written out.

A diagonal `h` at the output of `W a` for every position adds `sum_t h_ot a_ti^2` to the diagonal in `W`. What reaches
the input are columns for each entry; where positions are treated one by one, `W^T diag(h_t) W` at each position is the
sum of twice as many signed columns as an input has features. Layers in which no entry of the output depends on two of
the input (elementwise ones, max pooling, BatchNorm in evaluation mode) have a diagonal at their input again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.bordered import polarised
from bpk.plan.step import Link, Step
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, diagonal

EXACT = {torch.float32, torch.float64}
"""Formats whose rounding sums of squares with both signs survive."""

BEHIND = "behind a diagonal"
"""The name of columns that a diagonal has become at the input of a call."""


@dataclass
class WaitingDiagonal:
    """A diagonal `[N, *out]` at the output of a call, and `fewer` columns that make it than it has entries, if any."""

    values: Tensor
    fewer: LazyColumns | None = None
    name: Hashable = "residual"

    @property
    def count(self) -> int:
        """How many columns make it."""
        return self.values.shape[1:].numel() if self.fewer is None else self.fewer.count

    def columns(self) -> LazyColumns:
        """Columns that make it."""
        return replace(diagonal(self.values), name=self.name) if self.fewer is None else self.fewer

    def plus(self, other: WaitingDiagonal) -> WaitingDiagonal:
        """Both together."""
        return WaitingDiagonal(self.values + other.values)

    def behind(self, rule: Rule, view: Call) -> WaitingDiagonal | None:
        """What is at the input of the call, if that is a diagonal, too."""
        values = rule.diagonal_behind(view, self.values)
        if values is None:
            return None
        found = WaitingDiagonal(values, name=BEHIND)
        return found if found.count <= self.count else replace(found, fewer=self.columns_behind(rule, view))

    def columns_behind(self, rule: Rule, view: Call) -> LazyColumns:
        """Columns that make it, at the input of the call."""
        return replace(at_input(self.columns(), lambda mat: rule.jac_t_mat_prod(view, mat, 0)), name=BEHIND)

    def through(self, link: Link) -> WaitingDiagonal:
        """As it is at the output of what feeds an input."""
        if link.entrance is None:
            return self
        fewer = None if self.fewer is None else at_input(self.fewer, link.back)
        return replace(self, values=link.back(self.values[None])[0], fewer=fewer)


def at_input(columns: LazyColumns, change: Callable[[Tensor], Tensor]) -> LazyColumns:
    """Columns at an input, changed there."""

    def of_chunk(chunk: Chunk) -> Chunk:
        mats, signs = chunk
        return {0: change(mats[0])}, signs

    return columns.mapped(of_chunk)


def takes(step: Step) -> bool:
    """Whether a diagonal may pass a call this way: one input, and parameters that nothing else uses."""
    return step.samples_of_rows is None and can_take(step)


def can_take(step: Step) -> bool:
    """The same, whichever sample a row belongs to."""
    call = step.call
    if tied_inside(step):
        return False
    if step.rule is None or not step.rule.knows_diagonals or step.reused:
        return False
    return step.runs and len(call.inputs) == 1 and in_one_precision(call)


def in_one_precision(call: Call) -> bool:
    """Whether all tensors of a call have the same format, whose rounding sums of squares with both signs survive."""
    kinds = {x.dtype for x in (*call.inputs, *call.params.values(), call.output)}
    return len(kinds) == 1 and kinds <= EXACT


def tied_inside(step: Step) -> tuple[str, ...]:
    """The names of a call's parameters, used by no call further up, that are one and the same under several names."""
    params = [step.params[name] for name in step.last]
    if len(set(map(id, params))) == len(params):
        return ()
    return tuple([name for name in step.last if sum(p is step.params[name] for p in params) > 1])


def behind_diagonal(rule: Rule, view: Call, diag: WaitingDiagonal) -> LazyColumns:
    """The columns of a diagonal at the input of a call."""
    looks_at, dims = rule.acts_on(view), view.inputs[0].dim()
    axes = 0 if looks_at is None else dims - looks_at - 1
    if axes > 0 and view.inputs[0].shape[: 1 + axes] == diag.values.shape[: 1 + axes]:
        found = by_position(rule, view, diag.values, axes)
        if found.count <= diag.count:
            return found
    return diag.columns_behind(rule, view)


def by_position(rule: Rule, view: Call, diag: Tensor, axes: int) -> LazyColumns:
    """The same for a call that treats positions one by one: columns of each position, in turn."""
    n, shape = len(diag), view.inputs[0].shape
    mats, signs = diagonal(diag.flatten(0, axes)).all()
    everywhere = mats[0].unflatten(1, shape[: 1 + axes])  # [V, N, *T, O]: an entry of each position at a time
    sent = rule.jac_t_mat_prod(view, everywhere, 0).flatten(1, 1 + axes).flatten(2)  # [V, N T, I]
    if len(sent) > 2 * sent.shape[2]:
        rows = torch.bmm((sent * signs[..., None]).permute(1, 2, 0), sent.transpose(0, 1)).transpose(0, 1) / 2
        sent, signs = polarised(rows, torch.arange(sent.shape[2], device=sent.device))
    sent, signs = sent.unflatten(1, (n, -1)), signs.unflatten(1, (n, -1))  # [V, N, T, I], [V, N, T]
    positions = sent.shape[2]

    def make(start: int, stop: int) -> Chunk:
        here = torch.arange(start, stop, device=sent.device)
        column, position = here // positions, here % positions
        spread = sent.new_zeros(len(here), *sent.shape[1:])
        spread[here - start, :, position] = sent[column, :, position]
        mats: dict[Wrt, Tensor] = {0: spread.reshape(len(here), *shape)}
        return mats, signs[column, :, position]

    return LazyColumns(len(sent) * positions, make, BEHIND)
