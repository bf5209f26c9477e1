"""The family of layers that are linear in each operand, declared by one einsum pattern."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.broadcast import collect, spread
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import Example
from bpk.jacobians.families.linear_in_each import LinearInEach


class Multilinear(LinearInEach):
    """Any layer given by one einsum pattern over its inputs and parameters, in this order.

        out[n, ...] = sum prod_k operand_k

    `pattern` names axes by words separated by spaces, operands by commas, the result after `->`.
    The first axis of every input and of the output is the batch axis and has the same name; parameters
    lack it. `...` stands for any number of axes: `"n ... i, o i -> n ... o"`; where it comes first, the batch
    axis is any of them: `"... i, o i -> ... o"`. The last operands are the parameters named in `params`; `bias`
    optionally names one that is added along the last axes of the output.

    >>> from bpk.jacobians.core.call import Call
    >>> class Mixer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(3, 2))
    ...     def forward(self, x):
    ...         return torch.einsum("nti,oi->nto", x, self.weight)
    >>> rule = Multilinear("n t i, o i -> n t o", Mixer, params=("weight",))
    >>> call = Call.of(Mixer(), torch.ones(4, 5, 2), params=("weight",))
    >>> rule.jac_t_mat_prod(call, torch.ones(1, 4, 5, 3), "weight").shape
    torch.Size([1, 3, 2])
    """

    def __init__(
        self,
        pattern: str,
        *modules: type[nn.Module],
        functions: Sequence[Any] = (),
        params: Sequence[str] = (),
        bias: str | None = None,
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, functions=functions, params=(*params, *([bias] if bias else ())), examples=examples)
        self.pattern = pattern
        self.factors = tuple(params)
        self.added = (bias,) if bias else ()
        self._operands, self._result = _parse(pattern, len(self.factors))

    def acts_on(self, call: Call) -> int | None:
        """The axes behind `...`, where inputs and output begin with it and these are equally many."""
        several = {len(axes) - 1 for axes in (*self._operands[: self._inputs], self._result)}
        return several.pop() if self._result[0] == ANY and len(several) == 1 else None

    @property
    def _inputs(self) -> int:
        return len(self._operands) - len(self.factors)

    def _names(self) -> tuple[Wrt, ...]:
        return (*range(self._inputs), *self.factors)

    def _fitted(self, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Axes], Axes]:
        """The operands, their axes and those of the output, with `...` written out; refuses what does not fit."""
        values = [*inputs, *(params[name] for name in self.factors)]
        lengths = (x.dim() - len(axes) + 1 for axes, x in zip(self._operands, values, strict=False) if ANY in axes)
        count = max(next(lengths, 0), int(self._result[0] == ANY))
        operands = [_written_out(axes, count) for axes in self._operands]
        if why := self._misfit(values, operands):
            shapes = ", ".join(str(list(x.shape)) for x in values)
            what = f"'{self.pattern}' does not fit operands of shapes {shapes}."
            raise RuleError(what, why, "correct the pattern or the operands.")
        return values, operands, _written_out(self._result, count)

    def _misfit(self, values: Sequence[Tensor], operands: Sequence[Axes]) -> str | None:
        """What does not fit, in words."""
        if len(values) != len(operands):
            return f"the pattern has {len(operands)} operands, the layer {len(values)} (inputs, then {self.factors})."
        seen: dict[str, tuple[int, str]] = {}
        for name, axes, value in zip(self._names(), operands, values, strict=True):
            whose = f"input {name}" if isinstance(name, int) else f"parameter '{name}'"
            if value.dim() != len(axes):
                return f"{whose} has {_counted(value.dim())}, and in the pattern {_counted(len(axes))}."
            for axis, length in zip(axes, value.shape, strict=True):
                known, first = seen.setdefault(axis, (length, whose))
                if known != length:
                    return f"the axis '{axis}' is {known} long in {first} and {length} long in {whose}."
        return None

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        values, operands, result = self._fitted(inputs, params)
        out = _einsum(operands, result, values)
        for name in self.added:
            if name in params:
                out = out + params[name]
        return out

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if wrt in self.added:
            return spread(mat[:, None], call.output.shape[1:], 2).expand(-1, *call.output.shape).clone()
        values, operands, result = self._fitted(call.inputs, call.params)
        k = self._names().index(wrt)
        operands[k], values[k] = (COLUMNS, *operands[k]), mat
        return _einsum(operands, (COLUMNS, *result), values)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, str) and wrt in self.added:
            rows = collect(mat, call.params[wrt].shape, 2)
            return rows.sum(1) if sum_batch else rows.clone()
        values, operands, result = self._fitted(call.inputs, call.params)
        k = self._names().index(wrt)
        axes = operands[k]
        operands[k], values[k] = (COLUMNS, *result), mat
        present = {axis for operand in operands for axis in operand}
        for axis, length in zip(axes, call.shape_of(wrt), strict=True):
            if axis not in present:  # what only the operand has is spread over
                operands.append((axis,))
                values.append(mat.new_ones(length))
        batch = () if isinstance(wrt, int) or sum_batch else result[:1]
        return _einsum(operands, (COLUMNS, *batch, *axes), values)


Axes = tuple[str, ...]
"""The names of a tensor's axes."""

ANY = "..."
"""Stands for any number of axes, which are the same wherever it stands."""

MOST = 52
"""How many axes `torch.einsum` can tell apart."""

COLUMNS = "columns of a block"
"""An axis that no pattern can name."""


def _parse(pattern: str, params: int) -> tuple[list[Axes], Axes]:
    """The axes of all operands and of the output; refuses what is not multilinear."""
    left, arrow, right = pattern.partition("->")
    operands = [tuple(part.split()) for part in left.split(",")]
    out = tuple(right.split())
    reason = ""
    inputs = operands[: len(operands) - params]
    if not arrow or not out:
        reason = "it needs '->' followed by the axes of the output."
    elif not inputs:
        reason = f"it has {len(operands)} operands, {params} of them parameters; at least one must be an input."
    elif any(not part or part[0] != out[0] for part in inputs):
        reason = f"the batch axis '{out[0]}' must come first in every input."
    elif any(out[0] in part for part in operands[len(inputs) :]):
        reason = f"a parameter has the batch axis '{out[0]}'."
    elif any(count > 1 for part in (*operands, out) for count in Counter(part).values()):
        reason = "an operand or the output repeats an axis."
    elif unknown := [word for word in out if not any(word in part for part in operands)]:
        reason = f"axis '{unknown[0]}' of the output is in no operand."
    elif (count := len({word for part in operands for word in part})) >= MOST:
        reason = f"it has {count} axes."
    elif wrong := [word for part in operands for word in part if "." in word and word != ANY]:
        reason = f"'{wrong[0]}' is no name of an axis ('{ANY}' is a word by itself)."
    if reason:
        raise RuleError(f"'{pattern}' is not a multilinear pattern.", reason, "write, e.g., 'n t i, o i -> n t o'.")
    return operands, out


def _written_out(axes: Axes, count: int) -> Axes:
    """Axes with names for those that `...` stands for."""
    if ANY not in axes:
        return axes
    k = axes.index(ANY)
    return (*axes[:k], *(f"{ANY}[{j}]" for j in range(count)), *axes[k + 1 :])


def _einsum(operands: Sequence[Axes], result: Axes, values: Sequence[Tensor]) -> Tensor:
    """`torch.einsum`, with axes by name."""
    numbers: dict[str, int] = {}
    given: list[Any] = []
    for axes, value in zip(operands, values, strict=True):
        given += [value, [numbers.setdefault(axis, len(numbers)) for axis in axes]]
    return torch.einsum(*given, [numbers[axis] for axis in result])


def _counted(axes: int) -> str:
    return "1 axis" if axes == 1 else f"{axes} axes"
