"""Calls that autograd's graph remembers by itself: fused attention kernels, whose nodes keep all that a rule needs.

A model that calls `F.scaled_dot_product_attention` gets a kernel that autograd can differentiate only once. Its node
keeps queries, keys, values and options, so the call is written down during the backward pass, as if a layer had made
it, and the rule of the function serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.attention.function import ScaledDotProductAttention
from bpk.jacobians.core.errors import explain, warn
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.ownership import can_be_written_down, give
from bpk.recording.record import Record
from bpk.rules import REGISTRY

MASKS = {
    "ScaledDotProductFlashAttentionForCpuBackward": ("attn_mask",),
    "ScaledDotProductFlashAttentionBackward": (),
    "ScaledDotProductEfficientAttentionBackward": ("attn_bias",),
    "ScaledDotProductCudnnAttentionBackward": ("attn_bias",),
    "ScaledDotProductFusedAttentionOverrideableBackward": ("attn_bias",),
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
def attention(is_causal: bool, scale: float | None, grouped: bool) -> FusedAttention:
    """One module for all calls with the same options: what is known of a graph's form is found by its modules."""
    module = FusedAttention(is_causal, scale, grouped)
    module.__dict__["_bpk_path"] = "F.scaled_dot_product_attention"
    return module


def names_of_call(node: Node) -> tuple[str, ...]:
    """Under which names a node of fused attention keeps its call; nothing for all others.

    A name that is missing, or one that is not known, may stand for an option that has been renamed or added: such a
    node is left to autograd.
    """
    masks = MASKS.get(node.name().removesuffix("0"))
    if masks is None:
        return ()
    wanted, names = (*TENSORS, *OPTIONS, *masks), engine.saved_names(type(node))
    return () if names - OTHER != set(wanted) else wanted


class SavedInside:
    """Looks up what autograd has kept of a call: at the node of its output, else at the only fused attention inside.

    Args:
        node: That of the output.
        ends: Those of the inputs, which belong to other calls.
    """

    def __init__(self, node: Node, ends: Collection[Node | None]) -> None:
        self.node, self.ends = node, ends

    @cached_property
    def kernel(self) -> Node | None:
        """The fused attention."""
        found = [node for node in between(self.node, self.ends.__contains__) if names_of_call(node)]
        return found[0] if len(found) == 1 else None

    def __call__(self, name: str) -> Tensor | None:
        kept = engine.saved_tensor(self.node, name)
        return kept if kept is not None or self.kernel is None else engine.saved_tensor(self.kernel, name)


def misread(module: FusedAttention, inputs: Sequence[Tensor], mask: Tensor, output: Tensor) -> bool:
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


def recover_attention(edge: Edge, again: Callable[[], bool]) -> Record | None:
    """The record of a fused attention kernel, from its node; `None` for all others.

    `again` tells whether one inside of a checkpoint may be computed again for that.
    """
    node, nr = edge
    names = names_of_call(node) if node is not None and nr == 0 else ()
    if node is None or not names or not can_be_written_down(node, names[0], again):
        return None
    query, key, value, output, dropout, is_causal, scale, *masks = kept_by(node, *names)
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
    if binding.problem:
        return None
    edges = tuple(node.next_functions[:3]) + ((None, 0),) * len(given)
    record = Record(module, rule, binding, binding.inputs, edges, {0: output.detach()}, {0: 0})
    give(node, record)
    return record
