"""The layers behind a call by tangents, where their parameters have fewer entries than there are columns.

The first layers of a network have few weights and many outputs: a curved layer above them makes a column of each of
its entries. With the matrix `H_n` at the output of a call, and `t_i` the derivative of that output in entry `i` of a
parameter, the diagonal is `sum_n t_i^T H_n t_i`, and what the residual `R` of each call on the way adds to it is
`t^T R t` with the tangents at its inputs: a pass forward for each entry, and no squares at weights on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from bpk.fields.arrived import Columns
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.products import Residual
from bpk.plan.plan import Plan
from bpk.plan.step import Step
from bpk.plan.stretch import STRETCH
from bpk.sweeps.columns.diagonals import EXACT, Diagonal, tied_inside


def calls_behind(plan: Plan, at: Step, count: int) -> list[Step]:
    """The calls behind `at`, whose parameters go by tangents instead of `count` columns; none where that does not pay.

    The columns may be merged behind the call: to no more than twice as many as its input has entries.
    """
    behind = [step for step in plan.steps[at.number + 1 :] if step.runs]
    params = [p for step in behind for p in step.params.values()]
    entries = sum([p.numel() for p in params])
    (link,) = at.links
    if not entries or entries >= min(count, 2 * prod(at.call.inputs[link].shape[1:])):
        return []
    ahead = {id(p) for step in plan.steps[: at.number + 1] for p in step.params.values()}
    if not ahead.isdisjoint(map(id, params)) or not all(can_push(step) for step in behind):
        return []
    return behind


def can_push(step: Step) -> bool:
    """Whether tangents may pass a call: by its rule, in one precision, sample by sample."""
    if step.rule is None or step.rule is STRETCH or step.is_loss or step.mixed or step.samples_of_rows is not None:
        return False
    kinds = {x.dtype for x in (*step.call.inputs, *step.call.params.values(), step.call.output)}
    return not step.reused and not tied_inside(step) and len(kinds) == 1 and kinds <= EXACT


def is_flat(step: Step, samples: tuple[int, ...] | None) -> bool:
    """Whether a call is linear in its input, and in each of its parameters."""
    rule, view = step.rule_at(samples), step.view(samples)
    wrts: tuple[Wrt, ...] = (*step.links, *step.params)
    return all(rule.residual(view, (wrt,)) is Residual.ZERO for wrt in wrts)


class QuadraticForm:
    """`t -> t^T H_n t` for tangents at the output of a call, where a diagonal and columns make `H_n`."""

    def __init__(self, diag: Diagonal, columns: Columns) -> None:
        self.diag = diag.values
        self.columns = columns

    def __call__(self, tangents: Tensor) -> Tensor:
        """`[P, N, *out] -> [P, N]`."""
        found = (tangents.square() * self.diag).flatten(2).sum(2)
        for key, mat in self.columns.blocks.items():
            squares = torch.bmm(mat.flatten(2).transpose(0, 1), tangents.flatten(2).permute(1, 2, 0)).square()
            signs = self.columns.signs[key]
            found += (squares if signs is None else squares * signs.T[..., None]).sum(1).T
        return found


class Tangents:
    """Tangents from the parameters of some calls to the one in front of them.

    Args:
        at: The call in front.
        behind: All calls behind it, consumers first.
        form: The matrix at its output.
        samples: Those that count (`None`: all).
        chunk: How many tangents may exist at a time.
    """

    def __init__(
        self, at: Step, behind: list[Step], form: QuadraticForm, samples: tuple[int, ...] | None, chunk: int
    ) -> None:
        self.order = [*reversed(behind), at]
        self.at = at
        self.form = form
        self.samples = samples
        self.chunk = chunk

    def squares(self, step: Step, name: str, grads: Mapping[Step, Tensor]) -> Tensor:
        """The diagonal in a parameter, `[N, *p]`, with the gradient at the output of each call."""
        shape = step.params[name].shape
        parts = [self.of(step, name, units, grads) for units in self.units(step.call.params[name])]
        found = torch.cat(parts).T.reshape(-1, *shape)
        rule, view = step.rule_at(self.samples), step.view(self.samples)
        if rule.residual(view, (name,)) is not Residual.ZERO:
            found = found + rule.residual_squares(view, grads[step], name)
        return found

    def units(self, param: Tensor) -> Iterator[Tensor]:
        """The unit vectors of a parameter, some at a time."""
        for start in range(0, param.numel(), self.chunk):
            here = torch.arange(start, min(start + self.chunk, param.numel()), device=param.device)
            units = param.new_zeros(len(here), param.numel())
            units[here - start, here] = 1
            yield units.view(-1, *param.shape)

    def of(self, step: Step, name: str, units: Tensor, grads: Mapping[Step, Tensor]) -> Tensor:
        """`[P, N]`: what these units make of all matrices on their way."""
        outs = {step: step.rule_at(self.samples).jac_mat_prod(step.view(self.samples), units, name)}
        total = units.new_zeros(len(units), outs[step].shape[1])
        for above in self.order[self.order.index(step) + 1 :]:
            arrived: dict[Wrt, Tensor] = {
                index: link.forth(outs[link.producer]) for index, link in above.links.items() if link.producer in outs
            }
            if not arrived:
                continue
            rule, view = above.rule_at(self.samples), above.view(self.samples)
            if rule.residual(view, tuple(arrived)) is not Residual.ZERO:
                curved = rule.residual_mat_prod(view, grads[above], arrived)
                total += sum([(curved[wrt] * mat).flatten(2).sum(2) for wrt, mat in arrived.items()])
            pushed = [rule.jac_mat_prod(view, mat, wrt) for wrt, mat in arrived.items()]
            outs[above] = sum(pushed[1:], pushed[0])
        return total + self.form(outs[self.at]) if self.at in outs else total
