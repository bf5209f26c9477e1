"""Squares of many columns at once: a matrix over time for each hidden unit, whatever the number of columns.

The squared weight gradients of all columns, `sum_v (sum_t d_vto u_ti)^2`, are `sum_ts K_o[t, s] u_ti u_si` with the
Gram matrix `K_o[t, s] = sum_v d_vto d_vso`. It serves every parameter of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from bpk.jacobians.core.side_by_side import pick
from bpk.jacobians.recurrent.back import is_columns_last
from bpk.jacobians.recurrent.scan import Trace
from bpk.jacobians.recurrent.stack import Pulled, Stack

LIMIT = 1 << 24
"""How many numbers the Gram matrices of a call may have."""


class TimeGrams:
    """Gram matrices over time for some columns: `[N, K H, T, T]` by scan, `[N, P, T, T]` for what is projected.

    The columns are not kept alive. Once somebody has asked, they are `complete`, and no more columns are added.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.mats: list[ref[Tensor]] = []
        self.complete = False
        self.weights: Tensor | None = None
        self.local: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}

    def holds(self, mats: Sequence[Tensor], weights: Tensor | None) -> bool:
        """Whether these are the Gram matrices of these columns with these weights."""
        if len(mats) != len(self.mats) or any(x is not y() for x, y in zip(mats, self.mats, strict=True)):
            return False
        if weights is None or self.weights is None:
            return weights is self.weights
        return torch.equal(weights, self.weights)

    def add(self, pulled: Pulled, samples: slice, weights: Tensor | None = None) -> None:
        """What came of some more columns, weighted by `[V, N]`, for some samples."""
        cell = self.stack.cell
        used = range(min(*cell.inputs, *cell.hidden), 1 + max(*cell.inputs, *cell.hidden))
        for row, adjoints in zip(self.stack.traces, pulled.adjoints, strict=True):
            for trace, adjoint in zip(row, adjoints, strict=True):
                width = adjoint.dq.shape[-1]
                units = slice(used.start * width, used.stop * width)
                dq = adjoint.dq.flatten(3)
                accumulate(self.of(self.local, trace, dq)[samples], dq, weights, units)
                if adjoint.dh is not None:
                    accumulate(self.of(self.states, trace, adjoint.dh)[samples], adjoint.dh, weights)

    def of(self, grams: dict[str, Tensor], trace: Trace, d: Tensor) -> Tensor:
        """The Gram matrices `[N, O, T, T]` of a scan."""
        if trace.scan.suffix not in grams:
            steps, n = trace.hidden.shape[:2]
            grams[trace.scan.suffix] = d.new_zeros(n, d.shape[3], steps, steps)
        return grams[trace.scan.suffix]

    def squares(self, param: str, per_sample: bool) -> Tensor:
        """The weighted squares of a parameter's gradients: `[*p]`, or `[N, *p]` where `per_sample`."""
        layer, place, role = self.stack.find(param)
        trace, cell = self.stack.traces[layer][place], self.stack.cell
        u, suffix = trace.value(role), trace.scan.suffix
        if role == "weight_hr":
            gram = self.states[suffix]
        else:
            blocks = self.local[suffix].unflatten(1, (sum(cell.parts), -1))
            gram = pick(blocks, cell.inputs if role.endswith("_ih") else cell.hidden, 1).flatten(1, 2)
        total = contracted(gram, u, per_sample)
        return total.clamp_(min=0) if self.weights is None else total  # rounding may leave tiny negative numbers


def contracted(gram: Tensor, u: Tensor | None, per_sample: bool = True) -> Tensor:
    """`sum_ts K_o[t, s] u_ti u_si` (without values, for a bias: `sum_ts K_o[t, s]`), summed over samples or not."""
    if u is None:
        return gram.sum((2, 3) if per_sample else (0, 2, 3))
    total = gram.new_zeros(*gram.shape[0 if per_sample else 1 : 2], u.shape[2])
    for n, values in enumerate(u.unbind(1)):
        goal = total[n] if per_sample else total
        goal += gram[n].flatten(1) @ (values[:, None] * values).flatten(0, 1)
    return total


def accumulate(grams: Tensor, d: Tensor, weights: Tensor | None, units: slice = slice(None)) -> None:
    """Add the Gram matrices over time of columns `[t, V, N, O]` that live for the first `t` of all steps."""
    t, right = len(d), units_first(d)
    left = right if weights is None else units_first(d * weights[..., None])
    for gram, a, b in zip(grams, left, right, strict=True):
        gram[units, :t, :t] += a[units] @ b[units].transpose(1, 2)


def units_first(d: Tensor) -> Tensor:
    """`[T, V, N, O]` as `[N, O, T, V]`; transposed as one matrix, which torch does in blocks that stay in cache."""
    t, v, n, o = d.shape
    if is_columns_last(d[0]):
        return d.permute(2, 3, 0, 1)
    return d.reshape(t * v, -1).t().contiguous().view(n, o, t, v)


def pays(stack: Stack, columns: int) -> bool:
    """Whether Gram matrices over time are cheaper than one product for each column, and not too large."""
    sizes = [(len(trace.hidden), trace.slopes.slope[0].numel()) for row in stack.traces for trace in row]
    return columns > 2 * sizes[0][0] and sum(numbers * steps * steps for steps, numbers in sizes) <= LIMIT
