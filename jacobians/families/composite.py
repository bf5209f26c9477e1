"""The algebra of rules: a layer made of other layers, with every product by composition.

`Chain(r1, r2, ...)` applies rules one after the other; `Sum` and `Concat` (in `branches.py`) apply several
to the same inputs and add or concatenate what they return. A parameter belongs to exactly one part, and that
part's own shortcuts serve it, with the columns carried to the part's output first. Composites nest.

The second derivative of a composition is the sum over parts `T_i^T R_i T_i`, where `R_i` is the residual of
part `i` (contracted with the gradient of its own output) and `T_i` the Jacobian of everything before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.products import Residual, add_up
from bpk.jacobians.core.series import Series
from bpk.jacobians.families.elementwise import Pointwise
from bpk.jacobians.families.linear_map import LinearMap
from bpk.jacobians.families.parts import Composite, join_columns


class Chain(Composite):
    """`f = f_k(... f_2(f_1(x)))`: `J = J_k ... J_1`. The first part takes all inputs, later ones one each.

    Example, a padding followed by a convolution without padding::

        Chain((pad, pad_options), (conv, conv_options), params={"weight": (1, "weight"), "bias": (1, "bias")})
    """

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return self._evaluate(options, inputs, params, None)[-1].output

    def _evaluate(
        self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor], output: Tensor | None
    ) -> list[Call]:
        calls: list[Call] = []
        for i in range(len(self.parts)):
            known = output if i == len(self.parts) - 1 else None
            calls.append(self._part_call(i, options, inputs, params, known))
            inputs = (calls[-1].output,)
        return calls

    def _pull_to(self, call: Call, index: int, mat: Tensor) -> Tensor:
        for rule, inner in reversed(self._inner(call)[index + 1 :]):
            mat = rule.jac_t_mat_prod(inner, mat)
        return mat

    def _push_from(self, call: Call, index: int, mat: Tensor) -> Tensor:
        for rule, inner in self._inner(call)[index + 1 :]:
            mat = rule.jac_mat_prod(inner, mat)
        return mat

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if isinstance(wrt, str):
            return self._param_jac_mat_prod(call, mat, wrt)
        rule, inner = self._inner(call)[0]
        return self._push_from(call, 0, rule.jac_mat_prod(inner, mat, wrt))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, str):
            return self._param_jac_t_mat_prod(call, mat, wrt, sum_batch)
        rule, inner = self._inner(call)[0]
        return rule.jac_t_mat_prod(inner, self._pull_to(call, 0, mat), wrt)

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """Part by part."""
        for rule, inner in self._inner(call):
            series = {0: rule.taylor(inner, series)}
        return series[0]

    # ---- the second derivative --------------------------------------------------------------------
    def _wrts_of_parts(self, wrts: Sequence[Wrt]) -> list[tuple[Wrt, ...]]:
        """For every part, what it must be differentiated by: its input once anything before it moves."""
        joint = dict.fromkeys(wrts)
        first = tuple(wrt for wrt in wrts if isinstance(wrt, int))
        result: list[tuple[Wrt, ...]] = []
        for i in range(len(self.parts)):
            moving: tuple[Wrt, ...] = first if i == 0 else ((0,) if any(result) else ())
            result.append((*moving, *self._of_part(i, joint)))
        return result

    def _kinds(self, call: Call, wrts: Sequence[Wrt]) -> list[Residual]:
        pairs = zip(self._inner(call), self._wrts_of_parts(wrts), strict=True)
        return [rule.residual(inner, own) if own else Residual.ZERO for (rule, inner), own in pairs]

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        kinds = self._kinds(call, wrts)
        curved = [i for i, kind in enumerate(kinds) if kind is not Residual.ZERO]
        if not curved:
            return Residual.ZERO
        ahead = [rule for rule, _ in self.parts[: curved[-1]]]  # J^T R J stays diagonal if their J is
        diagonal = all(kinds[i] is Residual.DIAGONAL for i in curved) and all(isinstance(r, Pointwise) for r in ahead)
        return Residual.DIAGONAL if diagonal and tuple(wrts) == (0,) else Residual.GENERAL

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        grads, kinds = self._grads(call, grad_out), self._kinds(call, (0,))
        total, slope = torch.zeros_like(call.inputs[0]), torch.ones_like(call.inputs[0])[None]
        last = max(i for i, kind in enumerate(kinds) if kind is not Residual.ZERO)
        for i, (rule, inner) in enumerate(self._inner(call)[: last + 1]):
            if kinds[i] is not Residual.ZERO:
                total = total + slope[0].square() * rule.residual_diag(inner, grads[i])
            slope = rule.jac_mat_prod(inner, slope) if i < last else slope
        return total

    def _grads(self, call: Call, grad_out: Tensor) -> list[Tensor]:
        """The gradient of every part's output."""
        grads = [grad_out]
        for rule, inner in reversed(self._inner(call)[1:]):
            grads.insert(0, rule.jac_t_mat_prod(inner, grads[0][None])[0])
        return grads

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """Tangents travel forward through the parts; residual products are collected on the way back."""
        parts, kinds, grads = self._inner(call), self._kinds(call, tuple(mats)), self._grads(call, grad_out)
        tangents: list[dict[Wrt, Tensor]] = []
        moving: dict[Wrt, Tensor] = {wrt: mat for wrt, mat in mats.items() if isinstance(wrt, int)}
        for i, (rule, inner) in enumerate(parts):
            tangents.append({**moving, **self._of_part(i, mats)})
            pushed = [rule.jac_mat_prod(inner, mat, wrt) for wrt, mat in tangents[i].items() if i < len(parts) - 1]
            moving = {0: add_up(pushed)} if pushed else {}

        result: dict[Wrt, Tensor] = {}
        carried: Tensor | None = None  # [V, N, *out_i], what the later parts send back
        for i in reversed(range(len(parts))):
            rule, inner = parts[i]
            own: dict[Wrt, Tensor] = {}
            if kinds[i] is not Residual.ZERO:
                own = rule.residual_mat_prod(inner, grads[i], tangents[i])
            if carried is not None:
                for wrt in tangents[i]:
                    pulled = rule.jac_t_mat_prod(inner, carried, wrt)
                    own[wrt] = own[wrt] + pulled if wrt in own else pulled
            carried = own.get(0) if i else None
            result |= self._outer_names(i, own)
        return {wrt: result[wrt] if wrt in result else torch.zeros_like(mat) for wrt, mat in mats.items()}

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """Every part's own columns, pulled back through the parts before it."""
        parts, grads = self._inner(call), self._grads(call, grad_out)
        own_wrts, kinds = self._wrts_of_parts(wrts), self._kinds(call, wrts)
        found: list[tuple[dict[Wrt, Tensor], Tensor]] = []
        for i, (rule, inner) in enumerate(parts):
            if kinds[i] is Residual.ZERO:
                continue
            columns, signs = rule.residual_columns(inner, grads[i], own_wrts[i])
            outer = self._outer_names(i, columns)
            for k in reversed(range(i)):
                if 0 not in columns:
                    break
                before, at = parts[k]
                columns = {w: before.jac_t_mat_prod(at, columns[0], w, sum_batch=False) for w in own_wrts[k]}
                outer |= self._outer_names(k, columns)
            found.append((outer, signs))
        return join_columns(call, wrts, found)

    def _outer_names(self, index: int, values: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """Only the first part's inputs are the layer's."""
        own: dict[Wrt, Tensor] = {wrt: x for wrt, x in values.items() if isinstance(wrt, str) or index == 0}
        return super()._outer_names(index, own)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """Part by part; one sample at a time where the Jacobians of several parts vary over samples."""
        stop, name = (0, wrt) if isinstance(wrt, int) else self.owners[wrt]
        varying = sum(not isinstance(rule, LinearMap) for rule, _ in self.parts[stop:])
        calls = [call] if varying <= 1 else [call.subset([n]) for n in range(call.batch_size)]
        results = [self._congruence_by_parts(one, matrix, stop, name) for one in calls]
        return add_up(results) / len(results)

    def _congruence_by_parts(self, call: Call, matrix: Tensor, stop: int, name: Wrt) -> Tensor:
        parts = self._inner(call)
        for rule, inner in reversed(parts[stop + 1 :]):
            matrix = rule.congruence(inner, matrix)
        rule, inner = parts[stop]
        return rule.congruence(inner, matrix, name)
