"""The algebra of rules, second half: layers that apply several rules to the same inputs.

`Sum` adds what its branches return, `Concat` puts it side by side. Both are linear in the branches, so each
branch sees its own share of the output's gradient, and products, residuals and columns add up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bpk.jacobians.core.broadcast import collect
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.products import Residual, add_up
from bpk.jacobians.core.series import Series, Term
from bpk.jacobians.families.parts import Composite, Part, join_columns
from bpk.jacobians.rule import Rule


class CurvedBranch(NamedTuple):
    """A branch with a second derivative: its call, its share of the gradient, and what it depends on."""

    part: int
    rule: Rule
    call: Call
    grad: Tensor
    wrts: tuple[Wrt, ...]
    kind: Residual


class Branches(Composite):
    """What sums and concatenations share: `f(x) = combine(f_1(x), f_2(x), ...)`."""

    @abstractmethod
    def _combine(self, results: Sequence[Tensor], lead: int) -> Tensor:
        """Put the branches' `[N, *out_i]` (`lead` = 0) or `[V, N, *out_i]` (`lead` = 1) together."""

    @abstractmethod
    def _shares(self, call: Call, mat: Tensor) -> Sequence[Tensor]:
        """The transpose of `_combine`: `[V, N, *out]` to one `[V, N, *out_i]` per branch."""

    @abstractmethod
    def _block(self, call: Call, matrix: Tensor, index: int) -> Tensor:
        """The rows and columns `[D_i, D_i]` of a matrix over `*out` that a branch sees."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return self._combine([c.output for c in self._evaluate(options, inputs, params, None)], lead=0)

    def _evaluate(
        self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor], output: Tensor | None
    ) -> list[Call]:
        return [self._part_call(i, options, inputs, params, None) for i in range(len(self.parts))]

    def _pull_to(self, call: Call, index: int, mat: Tensor) -> Tensor:
        return self._shares(call, mat)[index]

    def _push_from(self, call: Call, index: int, mat: Tensor) -> Tensor:
        others = [mat.new_zeros(*mat.shape[:2], *inner.output.shape[1:]) for _, inner in self._inner(call)]
        return self._combine([*others[:index], mat, *others[index + 1 :]], lead=1)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if isinstance(wrt, str):
            return self._param_jac_mat_prod(call, mat, wrt)
        return self._combine([rule.jac_mat_prod(inner, mat, wrt) for rule, inner in self._inner(call)], lead=1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, str):
            return self._param_jac_t_mat_prod(call, mat, wrt, sum_batch)
        pairs = zip(self._inner(call), self._shares(call, mat), strict=True)
        return add_up(rule.jac_t_mat_prod(inner, share, wrt) for (rule, inner), share in pairs)

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """Branch by branch."""
        found = [rule.taylor(inner, series) for rule, inner in self._inner(call)]
        terms: list[Term] = []
        for k in range(found[0].order):
            parts = [s.terms[k] for s in found]
            known = next((c for c in parts if c is not None), None)
            if known is None:
                terms.append(None)
                continue
            shapes = [(len(known), *s.value.shape) for s in found]
            full = [known.new_zeros(shape) if c is None else c for shape, c in zip(shapes, parts, strict=True)]
            terms.append(self._combine(full, lead=1))
        return replace(found[0].moved(call.output, terms), nested=any(s.nested for s in found))

    # ---- the second derivative: branch by branch ---------------------------------------------------
    def _curved(self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt]) -> list[CurvedBranch]:
        """The branches whose residual is not zero."""
        inputs, joint = tuple(w for w in wrts if isinstance(w, int)), dict.fromkeys(wrts)
        shares = self._shares(call, grad_out[None])
        found: list[CurvedBranch] = []
        for i, ((rule, inner), share) in enumerate(zip(self._inner(call), shares, strict=True)):
            own = (*inputs, *self._of_part(i, joint))
            kind = rule.residual(inner, own) if own else Residual.ZERO
            if kind is not Residual.ZERO:
                found.append(CurvedBranch(i, rule, inner, share[0], own, kind))
        return found

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        kinds = {branch.kind for branch in self._curved(call, call.output, wrts)}  # whatever the gradient is
        if not kinds:
            return Residual.ZERO
        return Residual.DIAGONAL if kinds == {Residual.DIAGONAL} and tuple(wrts) == (0,) else Residual.GENERAL

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        return add_up(b.rule.residual_diag(b.call, b.grad) for b in self._curved(call, grad_out, (0,)))

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        total = {wrt: torch.zeros_like(mat) for wrt, mat in mats.items()}
        for b in self._curved(call, grad_out, tuple(mats)):
            given: dict[Wrt, Tensor] = {w: mats[w] for w in b.wrts if isinstance(w, int)}
            product = b.rule.residual_mat_prod(b.call, b.grad, given | self._of_part(b.part, mats))
            for wrt, value in self._outer_names(b.part, product).items():
                total[wrt] = total[wrt] + value
        return total

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        found = []
        for b in self._curved(call, grad_out, wrts):
            columns, signs = b.rule.residual_columns(b.call, b.grad, b.wrts)
            found.append((self._outer_names(b.part, columns), signs))
        return join_columns(call, wrts, found)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """Of a parameter: by its branch. Of an input, branches meet in cross terms: sample by sample."""
        if isinstance(wrt, int):
            return super().congruence(call, matrix, wrt)
        index, rule, inner, name = self._owner(call, wrt)
        return rule.congruence(inner, self._block(call, matrix, index), name)


class Sum(Branches):
    """`f(x) = f_1(x) + f_2(x) + ...` (residual connections), with broadcasting behind the batch axis."""

    def mixing(self, call: Call) -> str | None:
        if self._random(call) is None and len({inner.output.dim() for _, inner in self._inner(call)}) > 1:
            return "its branches return different numbers of axes, so that broadcasting mixes samples"
        return super().mixing(call)

    def _combine(self, results: Sequence[Tensor], lead: int) -> Tensor:
        return add_up(results)

    def _shares(self, call: Call, mat: Tensor) -> Sequence[Tensor]:
        return [collect(mat, inner.output.shape[1:], 2) for _, inner in self._inner(call)]

    def _block(self, call: Call, matrix: Tensor, index: int) -> Tensor:
        own, out = self._inner(call)[index][1].output.shape[1:], call.output.shape[1:]
        for _ in range(2):
            matrix = collect(matrix.unflatten(1, out), own).flatten(1).T
        return matrix


class Concat(Branches):
    """`f(x) = [f_1(x), f_2(x), ...]` along `axis`, counted with the batch axis, which is axis 0."""

    def __init__(
        self,
        *parts: Part,
        axis: int = 1,
        modules: Sequence[type[nn.Module]] = (),
        functions: Sequence[Any] = (),
        params: Mapping[str, tuple[int, str]] | None = None,
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*parts, modules=modules, functions=functions, params=params, examples=examples)
        self.axis = axis

    def obstacle(self, call: Call) -> str | None:
        if self.axis % call.output.dim() == 0:
            return "it concatenates along the batch axis, so that rows of its output are not samples"
        return super().obstacle(call)

    def _at(self, lead: int) -> int:
        return self.axis if self.axis < 0 else self.axis + lead

    def _sizes(self, call: Call) -> list[int]:
        return [inner.output.shape[self.axis] for _, inner in self._inner(call)]

    def _combine(self, results: Sequence[Tensor], lead: int) -> Tensor:
        return torch.cat(list(results), self._at(lead))

    def _shares(self, call: Call, mat: Tensor) -> Sequence[Tensor]:
        return mat.split(self._sizes(call), self._at(1))

    def _block(self, call: Call, matrix: Tensor, index: int) -> Tensor:
        entries = torch.arange(matrix.shape[0], device=matrix.device).reshape(1, 1, *call.output.shape[1:])
        mine = self._shares(call, entries)[index].flatten()
        return matrix[mine][:, mine]
