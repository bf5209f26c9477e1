"""Multi-head attention. Transformer layers need no rule: they consist of it, linear layers and normalisations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.attention.function import DotProductRule, ScaledDotProductAttention, read_attention
from bpk.jacobians.attention.layer import AttentionLayer
from bpk.jacobians.attention.parts import PROJECTIONS, Settings
from bpk.jacobians.core.binding import Axis, Binding, named_arguments
from bpk.jacobians.core.conversion import reading
from bpk.jacobians.core.example import case


class MultiheadAttentionRule(AttentionLayer):
    """Reads the arguments of `nn.MultiheadAttention`."""

    def draws(self, module: nn.Module) -> bool:
        assert isinstance(module, nn.MultiheadAttention)
        return module.training and module.dropout > 0

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        assert isinstance(module, nn.MultiheadAttention)
        given = named_arguments(module, args, kwargs)
        inputs: list[Tensor] = [given["query"], given["key"], given["value"]]
        problem, do = problem_of(module, inputs)
        if problem:
            return Binding(module, tuple(inputs), problem=problem, do=do)
        batch: Axis = 0 if module.batch_first else 1
        axes, masks, shared = [batch] * 3, [], None
        padding, mask, weighted = given["key_padding_mask"], given["attn_mask"], bool(given["need_weights"])
        causal = bool(given["is_causal"]) and padding is None and not weighted  # then torch ignores the mask itself
        if padding is not None:
            inputs.append(padding)
            masks.append("padding")
            axes.append(0)
        if mask is not None and not causal and mask.dim() == 3:
            inputs.append(mask.unflatten(0, (-1, module.num_heads)))
            masks.append("mask")
            axes.append(0)
        elif mask is not None and not causal:
            shared = mask.detach()
            problem = "its attn_mask is shared by all samples, and is learned." if mask.requires_grad else ""
            do = "give every sample its own: attn_mask.expand(N * num_heads, L, S)."
        averaged, dropout = bool(given["average_attn_weights"]), module.dropout if module.training else 0.0
        options = Settings(module, tuple(masks), shared, causal, weighted, averaged, dropout)
        return Binding(options, tuple(inputs), tuple(axes), (batch or 0, 0), problem, do)


def problem_of(module: nn.MultiheadAttention, inputs: list[Tensor]) -> tuple[str, str]:
    """Why a call cannot be served, and what to do."""
    if any(x.is_nested for x in inputs):
        return "its inputs are nested tensors.", "pad them (x.to_padded_tensor(0.0)) and pass key_padding_mask."
    if inputs[0].dim() == 2:
        return "its input has no batch axis.", "add one: query[:, None] (query[None] if batch_first=True)."
    return "", ""


def attention(*args: Any, forward: Mapping[str, Any], **kwargs: Any) -> nn.MultiheadAttention:
    """A layer that is called with further arguments."""
    layer = nn.MultiheadAttention(*args, **kwargs)
    layer.forward = partial(layer.forward, **forward)  # type: ignore[method-assign]
    return layer


SAME = ((3, 2, 4),) * 3
CROSS = ((3, 2, 4), (3, 3, 4), (3, 3, 4))
OTHER_SIZES = ((3, 2, 4), (3, 3, 3), (3, 3, 2))
TIME_FIRST = ((2, 3, 4), (3, 3, 4), (3, 3, 4))

RULES = (
    MultiheadAttentionRule(
        nn.MultiheadAttention,
        functions=(F.multi_head_attention_forward,),
        params=("in_proj_weight", *PROJECTIONS, "in_proj_bias", "bias_k", "bias_v", "out_proj.weight", "out_proj.bias"),
        examples=(
            case(nn.MultiheadAttention, 4, 2, batch_first=True, shapes=SAME),
            case(nn.MultiheadAttention, 4, 2, bias=False, shapes=TIME_FIRST),
            case(nn.MultiheadAttention, 4, 2, kdim=3, vdim=2, batch_first=True, shapes=OTHER_SIZES),
            case(
                nn.MultiheadAttention,
                4,
                2,
                add_bias_kv=True,
                add_zero_attn=True,
                batch_first=True,
                shapes=(*CROSS, (3, 3)),
            ),
            case(attention, 4, 2, batch_first=True, forward={"need_weights": False}, shapes=CROSS),
            case(attention, 4, 1, batch_first=True, forward={"average_attn_weights": False}, shapes=CROSS),
        ),
    ),
    DotProductRule(
        ScaledDotProductAttention,
        functions=reading(read_attention, F.scaled_dot_product_attention),
        examples=(
            case(ScaledDotProductAttention, shapes=((3, 2, 2, 3), (3, 2, 3, 3), (3, 2, 3, 2))),
            case(ScaledDotProductAttention, is_causal=True, scale=0.7, shapes=((3, 2, 2), (3, 3, 2), (3, 3, 2))),
            case(ScaledDotProductAttention, shapes=((3, 2, 2, 2), (3, 2, 3, 2), (3, 2, 3, 2), (3, 1, 2, 3))),
            case(ScaledDotProductAttention, shapes=((3, 2, 2, 2), (3, 1, 3, 2), (3, 1, 3, 2))),
            case(ScaledDotProductAttention, enable_gqa=True, shapes=((3, 4, 2, 1), (3, 2, 3, 1), (3, 2, 3, 2))),
        ),
    ),
)
