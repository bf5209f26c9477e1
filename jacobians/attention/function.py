"""`F.scaled_dot_product_attention` as a layer: attention without projections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.attention.attention import Heads, Tangent, Triple, additive
from bpk.jacobians.attention.fused import Fused, kept_by_kernel
from bpk.jacobians.core.binding import Axis, Binding
from bpk.jacobians.core.broadcast import lifted
from bpk.jacobians.core.call import Call, Options, Wrt, once
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, require_constant
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.series import Series
from bpk.jacobians.families.latest import Latest
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.taylor import by_nesting


class ScaledDotProductAttention(nn.Module):
    """`softmax(scale q k^T + mask) v`, called like `F.scaled_dot_product_attention`.

    With `enable_gqa` there may be fewer heads of keys and values than of queries: neighbouring queries share them.

    >>> q = torch.zeros(2, 3, 4)
    >>> ScaledDotProductAttention(is_causal=True)(q, q, q).shape
    torch.Size([2, 3, 4])
    """

    def __init__(self, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)

    def extra_repr(self) -> str:
        shown = ["is_causal=True"] if self.is_causal else []
        shown += [] if self.scale is None else [f"scale={self.scale}"]
        return ", ".join([*shown, "enable_gqa=True"] if self.enable_gqa else shown)


def read_attention(
    query: Traced,
    key: Traced,
    value: Traced,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Conversion:
    """From a call of `F.scaled_dot_product_attention` to its module."""
    require_constant("an option of scaled_dot_product_attention", dropout_p, is_causal, scale, enable_gqa)
    if dropout_p:
        raise CannotConvert("it drops attention weights at random, and which ones is known to autograd only.")
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    return Conversion(ScaledDotProductAttention(is_causal, scale, enable_gqa), inputs)


class DotProductRule(Rule):
    """Queries `[N, ..., L, d]`, keys `[N, ..., S, d]`, values `[N, ..., S, e]`, and a mask that is added to the scores.

    A boolean mask says where to attend; a query that may attend nowhere gets zeros. Where `H` heads of queries share
    `H / g` of keys or values, each of these is repeated `g` times.
    """

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        names = ("query", "key", "value", "attn_mask")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        inputs = [given[name] for name in names if given.get(name) is not None]
        axes: list[Axis] = [0] * len(inputs)
        shared = len(inputs) > 3 and (inputs[3].dim() < inputs[0].dim() or inputs[3].shape[0] == 1)
        if shared and inputs[3].requires_grad:  # computed from parameters: every sample sends it a gradient
            mask = inputs[3][(None,) * (inputs[0].dim() - inputs[3].dim())]
            inputs[3] = mask.expand(inputs[0].shape[0], *mask.shape[1:])
        elif shared:
            inputs[3] = inputs[3] if inputs[3].dim() < inputs[0].dim() else inputs[3][0]
            axes[3] = None  # all samples share it
        common = inputs[0].dim() >= 3 and len({(x.dim(), x.shape[0]) for x in inputs[:3]}) == 1
        problem = "" if common else "its inputs have no common batch axis in front."
        do = "expand them to the batch size."
        return Binding(module, tuple(inputs), tuple(axes), problem=problem, do=do, certain=False)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return self.evaluate_heads(options, inputs).z

    def evaluate_heads(self, options: Options, inputs: Sequence[Tensor]) -> Heads:
        """The point: weights, from a mask broadcast to `[N, ..., L, S]`."""
        q, k, v = inputs[0], *(repeated(x, self.sharing(options, inputs, i)) for i, x in enumerate(inputs[1:3], 1))
        mask = None
        if options.is_causal:
            mask = additive(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1), q)
        elif len(inputs) > 3:
            given = inputs[3]
            mask = lifted(additive(~given if given.dtype == torch.bool else given, q), q.dim() - 1)
        return Heads.attend(q, k, v, mask, self.scale(options, q), zero_rows=True)

    def scale(self, options: Options, query: Tensor) -> float:
        """What scores are multiplied with."""
        return 1 / math.sqrt(query.shape[-1]) if options.scale is None else float(options.scale)

    def sharing(self, options: Options, inputs: Sequence[Tensor], index: int) -> int:
        """How many heads of queries share one of these keys, or values."""
        grouped = options.enable_gqa and index in (1, 2)
        return inputs[0].shape[-3] // inputs[index].shape[-3] if grouped else 1

    @once
    def at(self, call: Call) -> Heads:
        """The heads."""
        return self.evaluate_heads(call.options, call.inputs)

    def tangent(self, call: Call, mats: Mapping[Wrt, Tensor]) -> Tangent:
        """Tangents of the inputs, repeated as these are; that of a mask spread over its missing axes."""
        mask = lifted(mats[3], call.inputs[0].dim() - 1, 2).expand(-1, *self.at(call).p.shape) if 3 in mats else None
        keys, values = (
            repeated(mats[wrt], self.sharing(call.options, call.inputs, wrt)) if wrt in mats else None for wrt in (1, 2)
        )
        return Tangent(mats.get(0), keys, values, mask)

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        if 3 in series:
            return by_nesting(self, call, series)
        sharing = [self.sharing(call.options, call.inputs, i) for i in range(3)]
        return self.at(call).along(series, lambda c, i: repeated(c, sharing[i]))[0]

    def at_inputs(self, call: Call, found: Sequence[Tensor], wrts: Iterable[Wrt]) -> dict[Wrt, Tensor]:
        """Columns at queries, keys, values, scores as those at inputs, summed over axes along which one is repeated."""
        result: dict[Wrt, Tensor] = {}
        for wrt in wrts:
            x, columns = call.inputs[int(wrt)], found[int(wrt)]
            share = self.sharing(call.options, call.inputs, int(wrt))
            if share > 1:
                columns = columns.unflatten(-3, (-1, share)).sum(-3)
            shape = lifted(x, call.inputs[0].dim() - 1).shape
            result[wrt] = columns.sum_to_size(len(columns), *shape).reshape(len(columns), *x.shape)
        return result

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return self.at(call).push(self.tangent(call, {wrt: mat}))[0]

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        found = (mat, mat, mat, self.at(call).pull_scores(mat, None)) if wrt == 3 else self.pulled(call, mat)
        return self.at_inputs(call, found, (wrt,))[wrt]

    def pulled(self, call: Call, mat: Tensor) -> Triple:
        """Columns at queries, keys and values; those of the block that came last are kept for the other two."""
        latest: Latest[Triple] = call.memo((self, "latest"), Latest)
        return latest.find(mat, lambda: self.pull(call, mat), lambda found: 3 * mat.numel(), 0)

    def pull(self, call: Call, mat: Tensor) -> Triple:
        """The same, by torch's kernel where it has computed the output, for a single column or with many weights."""
        known = self.fused(call)
        if known is None or not len(mat) or not known.pays(len(mat)):
            return self.at(call).pull(mat, None)
        return known.pull(mat)

    def capture(self, call: Call) -> None:
        """Read what torch's kernel has kept."""
        self.fused(call)

    def fused(self, call: Call) -> Fused | None:
        """The call as torch's kernel has computed it, if it has."""
        query = call.inputs[0]
        known = kept_by_kernel(call, query.shape[1], call.options.is_causal, self.scale(call.options, query))
        same = known is not None and all(x.is_set_to(y) for x, y in zip(known.heads, call.inputs, strict=False))
        return known if same else None

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO if tuple(wrts) == (2,) else Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        return self.at_inputs(call, self.at(call).pull_second(grad_out, None, self.tangent(call, mats)), mats)


def repeated(x: Tensor, times: int) -> Tensor:
    """Every head `[..., H, T, d]` so many times, one after the other."""
    return x if times == 1 else x.repeat_interleave(times, -3)
