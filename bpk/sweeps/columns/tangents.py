"""The layers behind a call by tangents, where their parameters have fewer entries than there are columns.

The first layers of a network have few weights and many outputs: a curved layer above them makes a column of each of
its entries. With the matrix `H_n` at the output of a call, and `t_i` the derivative of that output in entry `i` of a
parameter, the diagonal is `sum_n t_i^T H_n t_i`, and what the residual `R` of each call on the way adds to it is
`t^T R t` with the tangents at its inputs: a pass forward for each entry, and no squares at weights on the way. Calls
push tangents by their rules, stretches of functions by the derivative of their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from bpk.fields.arrived import Columns
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.products import Residual
from bpk.plan.plan import Plan
from bpk.plan.step import Step
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.columns.diagonals import in_one_precision, tied_inside
from bpk.sweeps.columns.merging import flat
from bpk.sweeps.columns.run import Travelling
from bpk.sweeps.curvature import Curvature
from bpk.sweeps.products.call_products import CallProducts, linearised

PIECE = 1 << 21
"""How many numbers a block of tangents has on a processor: half of what columns have, since each call makes a new one
while that in front is alive; with less, calls of functions take more time than cache saves."""


def calls_behind(plan: Plan, at: Step, count: int, by_sample: bool) -> list[Step]:
    """The calls behind `at`, whose parameters go by tangents instead of `count` columns; none where that does not pay.

    The columns may be merged behind the call: to no more than twice as many as its input has entries. Of parameters
    that functions use only sums are known, and not what is `by_sample`.
    """
    behind = [step for step in plan.steps[at.number + 1 :] if step.runs]
    params = [p for step in behind for p in step.params.values()]
    entries = sum([p.numel() for p in params])
    (link,) = at.links
    if not entries or entries >= min(count, 2 * prod(at.call.inputs[link].shape[1:])):
        return []
    ahead = {id(p) for step in plan.steps[: at.number + 1] for p in step.params.values()}
    if not ahead.isdisjoint(map(id, params)) or not all(can_push(step, by_sample) for step in behind):
        return []
    return behind


def can_push(step: Step, by_sample: bool) -> bool:
    """Whether tangents may pass a call, in one precision, sample by sample."""
    if step.rule is None or step.is_loss or step.mixed or step.samples_of_rows is not None:
        return False
    if isinstance(step.call, StretchCall):
        aligned = all(rows is None for rows in step.call.rows_of_inputs)
        if not aligned or (by_sample and step.params):
            return False
    return not step.reused and not tied_inside(step) and in_one_precision(step.call)


def is_flat(step: Step, samples: tuple[int, ...] | None) -> bool:
    """Whether a call is linear in each of its parameters."""
    rule, view = step.seen(samples)
    return all(rule.residual(view, (name,)) is Residual.ZERO for name in step.params)


class QuadraticForm:
    """`t -> t^T H_n t` for tangents at one place, where a diagonal and columns make `H_n`."""

    def __init__(self, diag: Tensor | None = None, columns: Columns | None = None) -> None:
        self.diag = diag
        self.columns = Columns() if columns is None else columns

    @classmethod
    def of_residual(cls, products: CallProducts) -> QuadraticForm | None:
        """That of a residual in the input alone, if it is known to be a diagonal, or one and few columns."""
        rule, call, grad = products.rule, products.call, products.grad
        if products.stretch is not None or len(call.inputs) != 1:
            return None
        if rule.residual(call) is Residual.DIAGONAL:
            return cls(rule.residual_diag(call, grad))
        near = rule.curvature_behind(call, grad, None)
        if near is None:
            return None
        return cls(near.diag, Columns({"near": near.columns}, signs={"near": near.signs}))

    def __call__(self, tangents: Tensor, others: dict[Hashable, Tensor] | None = None) -> Tensor:
        """`[P, N, *out] -> [P, N]`; products with columns, which may go on to `others` places, are added there."""
        found = tangents.new_zeros(tangents.shape[:2])
        if self.diag is not None:
            found += by_column(tangents.square().mul_(self.diag))
        for key, mat in self.columns.blocks.items():
            product = torch.bmm(flat(mat).transpose(0, 1), flat(tangents).permute(1, 2, 0))  # [N, K, P]
            if others is None:
                found += squared(product, self.columns.signs[key])
            else:
                others[key] = others[key] + product if key in others else product
        return found


def by_column(mat: Tensor) -> Tensor:
    """`[P, N, *out]` summed over the entries of a sample, whatever their order in memory."""
    return mat.sum(tuple(range(2, mat.dim()))) if mat.dim() > 2 else mat


def squared(product: Tensor, signs: Tensor | None) -> Tensor:
    """Products `[N, K, P]` with columns of these signs `[K, N]`, as sums of squares `[P, N]`."""
    squares = product.square()
    return (squares if signs is None else squares * signs.T[..., None]).sum(1).T


class Tangents:
    """Tangents from the parameters of some calls to the one in front of them.

    Args:
        sweep: Says which samples count, and how many tangents may exist at a time.
        at: The call in front.
        behind: All calls behind it, consumers first.
        forms: What is curved ahead of them, at its output and at those of others to which columns go that pass it by.

    Raises:
        UnsupportedLayer: A function among them cannot be differentiated as often.
    """

    def __init__(self, sweep: Travelling, at: Step, behind: list[Step], forms: Mapping[Step, QuadraticForm]) -> None:
        self.order = [*reversed(behind), at]
        self.forms = forms
        self.signs = {key: signs for form in forms.values() for key, signs in form.columns.signs.items()}
        self.chunk = sweep.chunk
        if at.call.output.device.type == "cpu":
            self.chunk = min(self.chunk, max(1, PIECE // max(step.call.output.numel() for step in self.order)))
        self.last_reader: dict[Step, Step] = {}
        self.products: dict[Step, CallProducts] = {}
        self.residuals: dict[Step, QuadraticForm] = {}
        for step in self.order:
            self.last_reader |= {link.producer: step for link in step.links.values()}
            stretch = linearised(step, sweep.samples)
            if stretch is not None and stretch.refusal is not None:
                raise stretch.refusal
            rule, view = step.seen(sweep.samples)
            self.products[step] = CallProducts(rule=rule, call=view, grad=sweep.rows(step.grad), stretch=stretch)
            residual = QuadraticForm.of_residual(self.products[step])
            self.residuals |= {} if residual is None else {step: residual}

    def squares(self, step: Step, name: str) -> Callable[[bool], Tensor]:
        """The diagonal in a parameter: by sample or not; of one that functions use, the sum alone."""
        param, products = step.call.params[name], self.products[step]
        rows = torch.cat([self.of(step, name, units) for units in self.units(param)])  # [P, N]
        if products.stretch is not None:
            return partial(summed, (rows.sum(1) + self.own(step, name)).view(param.shape))
        found = rows.T.reshape(-1, *param.shape)
        if products.rule.residual(products.call, (name,)) is not Residual.ZERO:
            found = found + products.rule.residual_squares(products.call, products.grad, name)
        return partial(by_sample_or_not, found)

    def units(self, param: Tensor) -> Iterator[Tensor]:
        """The unit vectors of a parameter, some at a time."""
        for start in range(0, param.numel(), self.chunk):
            here = torch.arange(start, min(start + self.chunk, param.numel()), device=param.device)
            units = param.new_zeros(len(here), param.numel())
            units[here - start, here] = 1
            yield units.view(-1, *param.shape)

    def of(self, step: Step, name: str, units: Tensor) -> Tensor:
        """`[P, N]`: what these units make of all matrices on their way."""
        outs: dict[Step, Tensor] = {}
        products: dict[Hashable, Tensor] = {}
        total: Tensor | float = 0.0
        for above in self.order[self.order.index(step) :]:
            arrived: dict[Wrt, Tensor] = {
                index: link.forth(outs[link.producer]) for index, link in above.links.items() if link.producer in outs
            }
            if arrived:
                total = total + self.curved(above, arrived)
            elif above is not step:
                continue
            out = outs[above] = self.products[above].push({name: units} if above is step else arrived)
            if above in self.forms:
                total = total + self.forms[above](out, products)
            for link in above.links.values():
                if self.last_reader[link.producer] is above:  # so that not all are in memory at once
                    outs.pop(link.producer, None)
        for key, product in products.items():
            total = total + squared(product, self.signs[key])
        return total if isinstance(total, Tensor) else units.new_zeros(len(units), out.shape[1])

    def curved(self, step: Step, arrived: Mapping[Wrt, Tensor]) -> Tensor | float:
        """`[P, N]`: what the residual of a call makes of tangents at its inputs."""
        if step in self.residuals:
            return self.residuals[step](arrived[0])
        products = self.products[step].curve(arrived, Curvature.HESSIAN)
        return sum([by_column(products[wrt] * arrived[wrt]) for wrt in arrived.keys() & products.keys()])

    def own(self, step: Step, name: str) -> Tensor:
        """`[P]`: what the residual of a stretch makes of all units of a parameter that it uses."""
        parts = []
        for units in self.units(step.call.params[name]):
            curved = self.products[step].curve({name: units}, Curvature.HESSIAN).get(name)
            parts.append(units.new_zeros(len(units)) if curved is None else (curved * units).flatten(1).sum(1))
        return torch.cat(parts)


def summed(total: Tensor, per_sample: bool) -> Tensor:
    """`[*p]`, known as a sum only."""
    assert not per_sample
    return total


def by_sample_or_not(rows: Tensor, per_sample: bool) -> Tensor:
    """`[N, *p]`, or their sum."""
    return rows if per_sample else rows.sum(0)
