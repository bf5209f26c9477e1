"""Calls that autograd's graph remembers by itself: fused attention kernels, whose nodes keep all that a rule needs.

A model that calls `F.scaled_dot_product_attention` gets a kernel that autograd can differentiate only once. Its node
keeps queries, keys, values and options, so the call is written down during the backward pass, as if a layer had made
it, and the rule of the function serves it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.attention.function import ScaledDotProductAttention
from bpk.jacobians.core.errors import explain, warn
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.unseen import Unseen, standing_for
from bpk.recording.record import Record
from bpk.rules import REGISTRY

MASKS = {
    "ScaledDotProductFlashAttentionForCpu": ("attn_mask",),
    "ScaledDotProductFlashAttention": (),
    "ScaledDotProductEfficientAttention": ("attn_bias",),
    "ScaledDotProductCudnnAttention": ("attn_bias",),
    "ScaledDotProductFusedAttentionOverrideable": ("attn_bias",),
}
"""The nodes of fused attention, on processors and on GPUs, and where they keep a mask."""

TENSORS = ("query", "key", "value", "output")
OPTIONS = ("dropout_p", "is_causal", "scale")
OTHER = {"logsumexp", "log_sumexp", "philox_seed", "philox_offset", "rng_state", "unused"}
OTHER |= {"cum_seq_q", "cum_seq_k", "max_q", "max_k"}
"""What such nodes keep besides, and what changes no result."""


class FusedAttention(ScaledDotProductAttention, Plain):
    """Stands for a call of `F.scaled_dot_product_attention` that nobody has recorded."""


@lru_cache(maxsize=64)
def attention(is_causal: bool, scale: float | None, grouped: bool) -> nn.Module:
    """What stands for the layer."""
    name = "F.scaled_dot_product_attention"
    return standing_for(FusedAttention, name, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def names_of_call(node: Node) -> tuple[str, ...]:
    """Under which names a node of fused attention keeps its call; nothing for all others.

    A name that is missing, or one that is not known, may stand for an option that has been renamed or added: such a
    node is left to autograd.
    """
    masks = MASKS.get(name_of(type(node)))
    if masks is None:
        return ()
    wanted, names = (*TENSORS, *OPTIONS, *masks), engine.saved_names(type(node))
    return () if names - OTHER != set(wanted) else wanted


@dataclass(eq=False)
class SavedInside:
    """Looks up what autograd has kept of a call: at the node of its output, else at the only fused attention inside.

    The nodes of its inputs, where it `ends`, belong to other calls.
    """

    node: Node
    ends: Collection[Node | None]

    @cached_property
    def kernel(self) -> Node | None:
        """The fused attention."""
        inside = between(self.node, self.ends.__contains__)
        found = [node for node in inside if name_of(type(node)) in MASKS and names_of_call(node)]
        return found[0] if len(found) == 1 else None

    def __call__(self, name: str) -> Tensor | None:
        """A tensor."""
        kept = engine.saved_tensor(self.node, name)
        return kept if kept is not None or self.kernel is None else engine.saved_tensor(self.kernel, name)


def misread(module: nn.Module, inputs: Sequence[Tensor], mask: Tensor, output: Tensor) -> bool:
    """Whether the kernel took other numbers than those of the mask, so that what came out is no attention.

    The one for processors does (seen in torch 2.13), with 16 keys or more, where the mask is in single precision and
    the queries in double. The user is told: gradients are wrong as well.
    """
    if mask.dtype is not torch.float32 or inputs[0].dtype is not torch.float64:
        return False
    with torch.no_grad():
        right = torch.allclose(module(*inputs, mask.double()), output)
    if not right:
        what = "F.scaled_dot_product_attention has taken other numbers than those of its mask."
        why = "torch's kernel for processors misreads a mask in float32 beside queries in float64."
        warn(explain(what, why, "convert the mask, attn_mask.to(query.dtype); values are those of what was computed."))
    return not right


def read_attention(call: Unseen) -> Record | None:
    """The record of a fused attention kernel; `None` where it drops weights, or its mask is to be differentiated."""
    names = names_of_call(call.node)
    kept = call.kept(*names) if names else None
    if kept is None:
        return None
    query, key, value, output, dropout, is_causal, scale, *masks = kept
    given = [mask for mask in masks if mask is not None]
    if dropout or any(mask.requires_grad for mask in given) or not all(x.dim() == 4 for x in (query, key, value)):
        return None
    grouped = not query.shape[1] == key.shape[1] == value.shape[1]
    module = attention(bool(is_causal), scale, grouped)
    if given and misread(module, (query, key, value), given[0], output):
        return None
    rule = REGISTRY.find(module)
    assert rule is not None
    binding = rule.bind(module, (query, key, value, *given), {})
    return None if binding.problem else call.written(module, *binding.inputs, binding=binding, output=output.detach())
