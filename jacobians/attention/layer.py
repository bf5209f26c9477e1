"""Multi-head attention: `out = W_o attention(W_q x_q + b_q, W_k x_k + b_k, W_v x_v + b_v) + b_o`, all products.

Columns are pulled through the heads once and remembered, for the inputs and all parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.attention.attention import Heads, Tangent, merge_heads, split_heads
from bpk.jacobians.attention.derivatives import AttentionDerivatives
from bpk.jacobians.attention.dropout import REASON, probed, redrawn, unknown
from bpk.jacobians.attention.parts import (
    PROJECTIONS,
    Pulled,
    Settings,
    arrange,
    at_mask,
    beside,
    evaluate_heads,
    mask_tangent,
    of_kernel,
    projection,
    projection_tangent,
    same,
    weight_tangent,
)
from bpk.jacobians.core.call import Call, Wrt, once
from bpk.jacobians.core.numeric import linear
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.latest import Latest, block_of
from bpk.jacobians.families.redrawn import agrees
from bpk.jacobians.second_order.probing import precision

KEPT = 1 << 22
"""How many numbers are remembered at most of the columns that came last (but always those of one block)."""

PIECE = 1 << 16
"""How many weights (and columns at them) are worked on at a time on a processor, so that they stay in cache."""

BIAS = "out_proj.bias"
LINEAR: tuple[set[Wrt], ...] = ({2, BIAS}, {"v_proj_weight", BIAS}, {"out_proj.weight", BIAS})
"""The output is linear in each of these groups; in `in_proj_weight` it is not."""


class AttentionLayer(AttentionDerivatives):
    """The output `[N, L, D]` and the weights, `[N, L, S]` or `[N, H, L, S]`, of attention with projections.

    As for Kronecker factors, `in_proj_weight` stands for three linear layers, one below the other: `G` `[3 D, 3 D]` is
    the GGN of `in_proj_bias`, `A` the mean of those of query, key, value. `bias_k` and `bias_v` have their GGN block.
    """

    inside = {"in_proj_weight": "in_proj_bias", "out_proj.weight": "out_proj.bias"}

    def results(self, options: Settings, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> list[Tensor]:
        if options.dropout:
            raise unknown(self.name)
        return self.results_at(evaluate_heads(options, inputs, params), options, params)

    def results_at(self, at: Heads, options: Settings, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Output and weights of evaluated heads."""
        out = F.linear(merge_heads(at.z), params["out_proj.weight"], params.get("out_proj.bias"))
        return [out, at.attended.mean(1) if options.averaged else at.attended]

    def evaluate(self, call: Call, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        at = dataclasses.replace(evaluate_heads(call.options, inputs, params), keep=self.keep(call))
        return self.output_of(call, at, params)

    def output_of(self, call: Call, at: Heads, params: Mapping[str, Tensor]) -> Tensor:
        """The results that matter, of evaluated heads."""
        results = self.results_at(at, call.options, params)
        return self.merge(call, {k: results[k] for k in call.used}, 1)

    # ---- dropout -------------------------------------------------------------------------------------
    def obstacle(self, call: Call) -> str | None:
        return REASON if call.options.dropout and call.drawn is None else None

    def capture(self, call: Call) -> None:
        """Draw once more which weights were dropped, or read what torch's kernel has kept."""
        self.keep(call)
        of_kernel(call)

    def keep(self, call: Call) -> Tensor | None:
        """What the weights of this call were multiplied with, `[N, H, L, S]`; `None` where nothing is dropped."""
        if not call.options.dropout:
            return None
        return call.memo("mask", lambda: self.redraw(call))

    def redraw(self, call: Call) -> Tensor:
        """The mask with which this rule gives the output that the layer gave."""
        with torch.no_grad():
            plain = evaluate_heads(call.options, call.inputs, call.params)
            without = self.output_of(call, plain, call.params)
            for keep in self.candidates(call, plain):
                at = dataclasses.replace(plain, keep=keep)
                if agrees(self.output_of(call, at, call.params), without, call.output):
                    return keep
        raise unknown(self.name)

    def candidates(self, call: Call, plain: Heads) -> Iterator[Tensor]:
        """Masks that may have been drawn. Some devices draw other numbers in another precision (autocast)."""
        options, before = call.options, call.drawn
        if before is None:
            return
        for dtype in dict.fromkeys((plain.p.dtype, torch.float32, precision(call.output))):
            yield redrawn(before, options.dropout, plain.p, dtype)
        if not options.weighted and options.dropout < 1:  # only then torch may choose another kernel
            masked = options.attn_mask is not None or bool(options.masks)
            yield probed(before, options.dropout, plain.q, plain.p.shape[-1], masked, options.causal)

    # ---- the point, and columns and tangents at the heads --------------------------------------------
    @once
    def at(self, call: Call) -> Heads:
        """The heads."""
        plain = evaluate_heads(call.options, call.inputs, call.params, of_kernel(call))
        return dataclasses.replace(plain, keep=self.keep(call))

    @once
    def merged(self, call: Call) -> Tensor:
        """The heads' output side by side: `[N, L, D]`."""
        known = of_kernel(call)
        return merge_heads(self.at(call).z if known is None else known.output)

    def columns_at_heads(self, call: Call, mat: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """From columns at the results to those at the heads' output `[V, N, H, L, d]` and weights `[V, N, H, L, S]`."""
        parts = self.split(call, mat)
        heads, c, cp = call.options.heads, parts.get(0), parts.get(1)
        if c is not None:
            c = split_heads(linear(c, call.params["out_proj.weight"].T), heads)
        if cp is not None and call.options.averaged:
            cp = (cp / heads)[:, :, None].expand(-1, -1, heads, -1, -1)
        return c, cp

    def pulled(self, call: Call, mat: Tensor) -> Pulled:
        """Columns at the projections; remembered for the blocks of columns that came last, and for columns of these."""
        if (block := block_of(mat)) is not None:
            return self.pulled(call, block[0]).some(block[1])
        latest: Latest[Pulled] = call.memo((self, "latest"), Latest)
        return latest.find(mat, lambda: self.pull_in_pieces(call, mat), lambda found: 3 * mat.numel(), KEPT)

    def pull_in_pieces(self, call: Call, mat: Tensor) -> Pulled:
        """A few columns at a time, so that what is as large as the weights stays in the processor's cache."""
        known = of_kernel(call)
        if known is not None and len(mat) and known.pays(len(mat)):  # then the weights are no result
            return arrange(call, known.pull(split_heads(linear(mat, call.params["out_proj.weight"].T), known.count)))
        at = self.at(call)
        step = len(mat) if torch.is_grad_enabled() or mat.device.type != "cpu" else PIECE // max(1, at.p.numel())
        return beside([arrange(call, at.pull(*self.columns_at_heads(call, part))) for part in mat.split(max(1, step))])

    def tangent(self, call: Call, mats: Mapping[Wrt, Tensor]) -> Tangent:
        """Tangents at the heads from those of inputs, and of parameters before the heads."""
        found = [projection_tangent(call, mats, role) for role in range(3)]
        q, k, v = (None if t is None else split_heads(t, call.options.heads) for t in found)
        return Tangent(q, k, v, mask_tangent(call, mats, self.at(call)))

    # ---- the products --------------------------------------------------------------------------------
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        parts: dict[int, Tensor] = {}
        if wrt == "out_proj.bias":
            parts[0] = mat[:, None, None].expand(-1, *self.merged(call).shape[:2], -1).clone()
        elif wrt == "out_proj.weight":
            parts[0] = torch.matmul(self.merged(call), mat.transpose(1, 2)[:, None])
        else:
            tz, tp = self.at(call).push(self.tangent(call, {wrt: mat}))
            parts[0] = linear(merge_heads(tz), call.params["out_proj.weight"])
            parts[1] = tp.mean(2) if call.options.averaged else tp
        parts |= {k: mat.new_zeros(mat.shape[0], call.batch_size, *call.used[k]) for k in call.used if k not in parts}
        return self.merge(call, parts)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, str):
            return self.param_products(call, mat, wrt, sum_batch)
        if wrt < 3:
            return linear(self.pulled(call, mat).roles[wrt], projection(call.params, wrt)[0].T)
        return at_mask(call, self.at(call).pull_scores(*self.columns_at_heads(call, mat)), wrt)

    # ---- parameters ----------------------------------------------------------------------------------
    def operands(self, call: Call, param: str) -> list[Tensor]:
        if param == "out_proj.weight":
            return [self.merged(call)]
        if param == "in_proj_weight":
            return list(call.inputs[:1] if same(call.inputs[:3]) else call.inputs[:3])
        return [call.inputs[PROJECTIONS.index(param)]] if param in PROJECTIONS else []

    def columns(self, call: Call, mat: Tensor, param: str) -> list[Tensor]:
        if param == "out_proj.weight":
            parts = self.split(call, mat)
            return [parts[0] if 0 in parts else mat.new_zeros(mat.shape[0], *self.merged(call).shape)]
        found = self.pulled(call, mat)
        if param in PROJECTIONS:
            return [found.roles[PROJECTIONS.index(param)]]
        return [found.packed] if found.packed is not None and same(call.inputs[:3]) else list(found.roles)

    def vectors(self, call: Call, mat: Tensor, param: str) -> Tensor:
        if param == "out_proj.bias":
            return self.columns(call, mat, "out_proj.weight")[0].sum(2)
        found = self.pulled(call, mat)
        if param == "in_proj_bias":
            return torch.cat([m.sum(2) for m in found.roles], 2)
        return found.appended[param].reshape(*mat.shape[:2], *call.params[param].shape).clone()

    # ---- the second derivative -----------------------------------------------------------------------
    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO if any(set(wrts) <= group for group in LINEAR) else Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """The derivative of what `jac_t_mat_prod` gives for `grad_out`, along the tangents `mats`."""
        at, heads = self.at(call), call.options.heads
        t = self.tangent(call, mats)
        c, cp = (None if x is None else x[0] for x in self.columns_at_heads(call, grad_out[None]))
        zero = at.v.new_zeros(len(next(iter(mats.values()))), *at.v.shape) if t.vanishes else None
        dq, dk, dv, ds = at.pull_second(c, cp, Tangent(v=zero) if t.vanishes else t)
        grad = self.split(call, grad_out[None]).get(0)
        if "out_proj.weight" in mats and grad is not None:
            moved = split_heads(torch.matmul(grad, mats["out_proj.weight"][:, None]), heads)
            parts = at.pull(moved, None)
            dq, dk, dv, ds = dq + parts[0], dk + parts[1], dv + parts[2], ds + at.pull_scores(moved, None)
        second, first = arrange(call, (dq, dk, dv)), self.pulled(call, grad_out[None])

        def of_input(wrt: int) -> Tensor:
            if wrt > 2:
                return at_mask(call, ds, wrt)
            own = torch.matmul(second.roles[wrt], projection(call.params, wrt)[0])
            moved = weight_tangent(mats, wrt)
            return own if moved is None else own + torch.matmul(first.roles[wrt], moved[:, None])

        def of_projection(role: int) -> Tensor:
            total = torch.einsum("vnto,nti->voi", second.roles[role], call.inputs[role])
            if role in mats:
                total = total + torch.einsum("nto,vnti->voi", first.roles[role][0], mats[role])
            return total

        def of_param(wrt: str) -> Tensor:
            if wrt == "out_proj.weight" and grad is not None and not t.vanishes:
                return torch.einsum("nto,vnti->voi", grad[0], merge_heads(at.push(t)[0]))
            if wrt.startswith("out_proj"):
                return torch.zeros_like(mats[wrt])
            if wrt == "in_proj_bias":
                return torch.cat([m.sum((1, 2)) for m in second.roles], 1)
            if wrt in second.appended:
                return second.appended[wrt].sum(1).reshape(mats[wrt].shape)
            roles = range(3) if wrt == "in_proj_weight" else [PROJECTIONS.index(wrt)]
            return torch.cat([of_projection(role) for role in roles], 1)

        return {wrt: of_input(wrt) if isinstance(wrt, int) else of_param(wrt) for wrt in mats}
