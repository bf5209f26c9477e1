"""The family of layers that are linear in each operand, declared by one einsum pattern."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.broadcast import collect, spread
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import RuleError, explain
from bpk.jacobians.core.example import Example
from bpk.jacobians.families.linear_in_each import LinearInEach


class Multilinear(LinearInEach):
    """Any layer given by one einsum pattern over its inputs and parameters, in this order.

        out[n, ...] = sum prod_k operand_k

    `pattern` names axes by words separated by spaces, operands by commas, the result after `->`.
    The first axis of every input and of the output is the batch axis and has the same name; parameters
    lack it. `inputs` is the number of inputs (operands left over by `params`), `bias` optionally
    names a parameter added along the last axes of the output.

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
        self._axes, self._out = _parse(pattern, len(self.factors))
        self._free = next(c for c in _LETTERS if c not in self._letters)

    @cached_property
    def _letters(self) -> set[str]:
        return set(self._out).union(*self._axes)

    @property
    def _batch(self) -> str:
        return self._out[0]

    def _names(self) -> tuple[Wrt, ...]:
        count = len(self._axes) - len(self.factors)
        return (*range(count), *self.factors)

    def _values(self, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> list[Tensor]:
        values = [*inputs, *(params[name] for name in self.factors)]
        lengths: dict[str, int] = {}
        fits = len(values) == len(self._axes)
        for axes, value in zip(self._axes, values, strict=False):
            fits = fits and value.dim() == len(axes)
            for axis, length in zip(axes, value.shape, strict=False):
                fits = fits and lengths.setdefault(axis, length) == length
        if not fits:
            shapes = ", ".join(str(list(v.shape)) for v in values)
            raise RuleError(
                explain(
                    f"'{self.pattern}' does not fit operands of shapes {shapes}.",
                    f"every axis has one length; first seen: {_spell(self.pattern, lengths)}.",
                    "correct the pattern or the operands.",
                )
            )
        return values

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        values = self._values(inputs, params)
        out = torch.einsum(f"{','.join(self._axes)}->{self._out}", *values)
        for name in self.added:
            if name in params:
                out = out + params[name]
        return out

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if wrt in self.added:
            return spread(mat[:, None], call.output.shape[1:], 2).expand(-1, *call.output.shape).clone()
        k = self._names().index(wrt)
        values = self._values(call.inputs, call.params)
        terms = [*self._axes]
        terms[k], values[k] = self._free + terms[k], mat
        return torch.einsum(f"{','.join(terms)}->{self._free}{self._out}", *values)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, str) and wrt in self.added:
            rows = collect(mat, call.params[wrt].shape, 2)
            return rows.sum(1) if sum_batch else rows.clone()
        k, values = self._names().index(wrt), self._values(call.inputs, call.params)
        terms, axes = [*self._axes], self._axes[k]
        terms[k], values[k] = self._free + self._out, mat
        present = set("".join(terms))
        for axis, length in zip(axes, call.shape_of(wrt), strict=True):
            if axis not in present:  # what only the operand has is spread over
                terms.append(axis)
                values.append(mat.new_ones(length))
        target = axes if isinstance(wrt, int) or sum_batch else self._batch + axes
        return torch.einsum(f"{','.join(terms)}->{self._free}{target}", *values)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _parse(pattern: str, params: int) -> tuple[list[str], str]:
    """Translate axis words into letters, and refuse what is not multilinear."""
    left, arrow, right = pattern.partition("->")
    operands = [part.split() for part in left.split(",")]
    out = right.split()
    reason = ""
    words = list(dict.fromkeys(word for part in (*operands, out) for word in part))
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
    elif len(words) >= len(_LETTERS):
        reason = f"it has {len(words)} axes."
    if reason:
        raise RuleError(
            explain(f"'{pattern}' is not a multilinear pattern.", reason, "write, e.g., 'n t i, o i -> n t o'.")
        )
    letter = dict(zip(words, _LETTERS, strict=False))
    return ["".join(letter[w] for w in part) for part in operands], "".join(letter[w] for w in out)


def _spell(pattern: str, lengths: Mapping[str, int]) -> str:
    """Axis lengths under the words of the pattern."""
    words = list(dict.fromkeys(pattern.replace("->", " ").replace(",", " ").split()))
    return ", ".join(f"{w}={lengths[c]}" for w, c in zip(words, _LETTERS, strict=False) if c in lengths)
