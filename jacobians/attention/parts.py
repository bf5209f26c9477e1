"""What multi-head attention consists of around its heads: options, masks, projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.attention.attention import Heads, Triple, additive, split_heads
from bpk.jacobians.attention.fused import Fused, kept_by_kernel
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.numeric import is_differentiated, linear
from bpk.jacobians.core.series import add

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
APPENDED = {1: "bias_k", 2: "bias_v"}
"""Parameters that are appended to keys and to values, by the number of the input."""


@dataclass(frozen=True)
class Settings:
    """How one call of attention was made.

    `module` carries `num_heads` and `add_zero_attn`. Behind query, key and value, a call has the inputs in `masks`:
    `"padding"` `[N, S]`, `"mask"` `[N, H, L, S]`; `attn_mask` is one `[L, S]` for all samples. `weighted` says that the
    weights were asked for (a query without keys then gets NaN instead of zeros), `averaged` that they are averaged
    over heads. `dropout` is the rate at which weights are dropped in this call.
    """

    module: nn.Module
    masks: tuple[str, ...] = ()
    attn_mask: Tensor | None = None
    causal: bool = False
    weighted: bool = True
    averaged: bool = True
    dropout: float = 0.0

    @property
    def heads(self) -> int:
        """`H`."""
        return int(self.module.num_heads)  # type: ignore[arg-type]

    @property
    def appended(self) -> int:
        """How many keys the layer appends itself."""
        return int(self.module.bias_k is not None) + int(bool(self.module.add_zero_attn))


def projection(params: Mapping[str, Tensor], role: int) -> tuple[Tensor, Tensor | None]:
    """Weight `[D, E]` and bias `[D]` of the projection of query (0), key (1) or value (2)."""
    packed, bias = params.get("in_proj_weight"), params.get("in_proj_bias")
    weight = params[PROJECTIONS[role]] if packed is None else packed.chunk(3)[role]
    return weight, None if bias is None else bias.chunk(3)[role]


def evaluate_heads(
    settings: Settings, inputs: Sequence[Tensor], params: Mapping[str, Tensor], known: Fused | None = None
) -> Heads:
    """The heads of one call, without dropout; queries, keys and values may be `known`."""
    if known is not None:
        return attend(settings, inputs, known.heads)
    heads = settings.heads
    if "in_proj_weight" in params and not is_differentiated() and same(inputs[:3]):
        together, bias = linear(inputs[0], params["in_proj_weight"]), params.get("in_proj_bias")
        q, k, v = (together if bias is None else together.add_(bias)).chunk(3, -1)
    else:
        q, k, v = (F.linear(x, *projection(params, role)) for role, x in enumerate(inputs[:3]))
    if "bias_k" in params:
        k, v = append(k, params["bias_k"]), append(v, params["bias_v"])
    if settings.module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return attend(settings, inputs, (split_heads(q, heads), split_heads(k, heads), split_heads(v, heads)))


def of_kernel(call: Call) -> Fused | None:
    """A layer without dropout as torch's kernel has computed it, if it has."""
    settings, width = call.options, call.inputs[0].shape[-1]
    if settings.dropout or list(call.used) != [0]:
        return None
    return kept_by_kernel(call, settings.heads, settings.causal, (width // settings.heads) ** -0.5)


def attend(settings: Settings, inputs: Sequence[Tensor], found: Triple) -> Heads:
    """The heads, from queries, keys and values."""
    q, k, v = found
    return Heads.attend(q, k, v, mask_at(settings, inputs, q), q.shape[-1] ** -0.5, not settings.weighted)


def append(x: Tensor, row: Tensor) -> Tensor:
    """One more position `[1, 1, D]` for every sample."""
    return torch.cat([x, row.to(x.dtype).expand(x.shape[0], 1, -1)], 1)


# ---- masks -------------------------------------------------------------------------------------------
def mask_at(settings: Settings, inputs: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """All masks as one that is added to the scores, broadcast to `[N, H, L, S]`; what is appended is not masked."""
    if settings.causal:
        size = (inputs[0].shape[1], inputs[1].shape[1] + settings.appended)
        return additive(torch.ones(size, dtype=torch.bool, device=like.device).triu(1), like)
    total = None if settings.attn_mask is None else additive(settings.attn_mask, like)
    for name, given in zip(settings.masks, inputs[3:], strict=True):
        mask = additive(given, like)
        total = add(total, mask[:, None, None] if name == "padding" else mask)
    return total if total is None or not settings.appended else F.pad(total, (0, settings.appended))


def mask_tangent(call: Call, mats: Mapping[Wrt, Tensor], heads: Heads) -> Tensor | None:
    """The tangent of the scores from those of masks, broadcast to `[V, N, H, L, S]`."""
    total: Tensor | None = None
    for index, name in enumerate(call.options.masks, start=3):
        if index in mats:
            t = F.pad(mats[index], (0, call.options.appended))
            total = add(total, t[:, :, None, None] if name == "padding" else t)
    return None if total is None else total.expand(-1, *heads.p.shape)


def at_mask(call: Call, scores: Tensor, index: int) -> Tensor:
    """From columns at the scores `[V, N, H, L, S]` to those at a mask."""
    kept = scores[..., : call.inputs[1].shape[1]]
    return kept.sum((2, 3)) if call.options.masks[index - 3] == "padding" else kept.clone()


# ---- projections: tangents forward, columns backward ---------------------------------------------------
def projection_tangent(call: Call, mats: Mapping[Wrt, Tensor], role: int) -> Tensor | None:
    """The tangent `[V, N, T, D]` of one projection, with that of what is appended, from inputs and parameters."""
    x, total = call.inputs[role], None
    weight = projection(call.params, role)[0]
    if role in mats:
        total = torch.matmul(mats[role], weight.T)
    own = weight_tangent(mats, role)
    if own is not None:
        total = add(total, torch.matmul(x, own.transpose(1, 2)[:, None]))
    if "in_proj_bias" in mats:
        bias = mats["in_proj_bias"].chunk(3, 1)[role]
        total = add(total, bias[:, None, None].expand(-1, *x.shape[:2], -1))
    missing = call.options.appended if role else 0
    if total is not None:
        total = F.pad(total, (0, 0, 0, missing))
    if role and APPENDED[role] in mats:
        extra = mats[APPENDED[role]].flatten(1)[:, None, None]
        extra = F.pad(extra.expand(-1, x.shape[0], -1, -1), (0, 0, x.shape[1], missing - 1))
        total = add(total, extra)
    return total


def weight_tangent(mats: Mapping[Wrt, Tensor], role: int) -> Tensor | None:
    """The tangent `[V, D, E]` of a projection's weight."""
    packed = mats.get("in_proj_weight")
    return mats.get(PROJECTIONS[role]) if packed is None else packed.chunk(3, 1)[role]


@dataclass(frozen=True)
class Pulled:
    """Columns at the projections of query, key and value `[V, N, T, D]`, and at what is appended `[V, N, D]` by name.

    `packed` are all three side by side, `[V, N, T, 3 D]`, where they have equally many positions.
    """

    roles: Triple
    packed: Tensor | None
    appended: Mapping[str, Tensor]

    def some(self, part: slice) -> Pulled:
        """Some of the columns."""
        appended = {name: x[part] for name, x in self.appended.items()}
        q, k, v = (x[part] for x in self.roles)
        return Pulled((q, k, v), None, appended) if self.packed is None else packed(self.packed[part], appended)


def arrange(call: Call, found: Triple) -> Pulled:
    """Columns at the heads as columns at the projections."""
    lengths = [x.shape[1] for x in call.inputs[:3]]
    has_extra = "bias_k" in call.params
    appended = {name: found[r][..., lengths[r], :].flatten(2) for r, name in APPENDED.items()} if has_extra else {}
    own = [x[..., :t, :].transpose(2, 3) for x, t in zip(found, lengths, strict=True)]  # [V, N, T, H, d]
    if len(set(lengths)) == 1:
        return packed(torch.stack(own, 3).flatten(3), appended)
    q, k, v = (x.flatten(3) for x in own)
    return Pulled((q, k, v), None, appended)


def packed(together: Tensor, appended: Mapping[str, Tensor]) -> Pulled:
    """Columns `[V, N, T, 3 D]` by their parts."""
    q, k, v = together.chunk(3, -1)
    return Pulled((q, k, v), together, appended)


def beside(pieces: Sequence[Pulled]) -> Pulled:
    """Several blocks of columns as one."""
    if len(pieces) == 1:
        return pieces[0]
    appended = {name: torch.cat([piece.appended[name] for piece in pieces]) for name in pieces[0].appended}
    together = [piece.packed for piece in pieces if piece.packed is not None]
    if together:
        return packed(torch.cat(together), appended)
    q, k, v = (torch.cat(parts) for parts in zip(*(piece.roles for piece in pieces), strict=True))
    return Pulled((q, k, v), None, appended)


def same(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are the same one."""
    return all(x.is_set_to(tensors[0]) for x in tensors[1:])
