"""Diagonal residuals, which begin behind elementwise layers: how they pass the layer before without being written out.

A diagonal `h` at the output of `W a` for every position adds `sum_t h_ot a_ti^2` to the diagonal in `W`. What reaches
the input are columns for each entry; where positions are treated one by one, `W^T diag(h_t) W` at each position is the
sum of twice as many signed columns as an input has features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.bordered import polarised
from bpk.plan.step import Step
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, diagonal

EXACT = {torch.float32, torch.float64}
"""Formats whose rounding sums of squares with both signs survive."""


def takes(step: Step) -> bool:
    """Whether a diagonal may pass a call this way: one input, and parameters that nothing else uses."""
    return step.samples_of_rows is None and can_take(step)


def can_take(step: Step) -> bool:
    """The same, whichever sample a row belongs to."""
    call = step.call
    if tied_inside(step):
        return False
    if step.rule is None or not step.rule.knows_diagonals or not step.params or step.reused:
        return False
    kinds = {x.dtype for x in (*call.inputs, *call.params.values(), call.output)}
    return step.runs and len(call.inputs) == 1 and len(kinds) == 1 and kinds <= EXACT


def tied_inside(step: Step) -> tuple[str, ...]:
    """The names of a call's parameters, used by no call further up, that are one and the same under several names."""
    params = [step.params[name] for name in step.last]
    if len(set(map(id, params))) == len(params):
        return ()
    return tuple([name for name in step.last if sum(p is step.params[name] for p in params) > 1])


def behind_diagonal(rule: Rule, view: Call, diag: Tensor) -> LazyColumns:
    """The columns of a diagonal `[N, *out]` at the input of a call."""
    looks_at, dims = rule.acts_on(view), view.inputs[0].dim()
    axes = 0 if looks_at is None else dims - looks_at - 1
    if axes > 0 and view.inputs[0].shape[: 1 + axes] == diag.shape[: 1 + axes]:
        return by_position(rule, view, diag, axes)
    units = diagonal(diag)

    def make(start: int, stop: int) -> Chunk:
        mats, signs = units.make(start, stop)
        return {0: rule.jac_t_mat_prod(view, mats[0], 0)}, signs

    return LazyColumns(units.count, make, "behind a diagonal")


def by_position(rule: Rule, view: Call, diag: Tensor, axes: int) -> LazyColumns:
    """The same for a call that treats positions one by one: columns of each position, in turn."""
    n, shape = len(diag), view.inputs[0].shape
    mats, signs = diagonal(diag.flatten(0, axes)).all()
    sent = rule.jac_t_mat_prod(view.by_position(axes), mats[0], 0)  # [V, N T, I]
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

    return LazyColumns(len(sent) * positions, make, "behind a diagonal")
