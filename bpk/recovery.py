"""Calls that autograd's graph remembers by itself: fused attention kernels, whose nodes keep all that a rule needs.

A model that calls `F.scaled_dot_product_attention` gets a kernel that autograd can differentiate only once. Its node
keeps queries, keys, values and options, so the call is written down during the backward pass, as if a layer had made
it, and the rule of the function serves it.
"""

from __future__ import annotations

from functools import lru_cache

from bpk import engine
from bpk.jacobians.attention_function import ScaledDotProductAttention
from bpk.jacobians.function_module import Plain
from bpk.records import LEFT, OWNER, Edge, Record, Visit
from bpk.rules import REGISTRY

FUSED = "ScaledDotProduct"
"""How the names of all nodes of fused attention begin, on processors and on GPUs."""


class FusedAttention(ScaledDotProductAttention, Plain):
    """Stands for a call of `F.scaled_dot_product_attention` that nobody has recorded."""


@lru_cache
def attention(is_causal: bool, scale: float | None) -> FusedAttention:
    """One module for all calls with the same options: what is known of a graph's form is found by its modules."""
    module = FusedAttention(is_causal, scale)
    module.__dict__["_bpk_path"] = "F.scaled_dot_product_attention"
    return module


def recover(edge: Edge) -> Record | None:
    """The record of a fused attention kernel, from its node; `None` for all others."""
    node, nr = edge
    if node is None or nr != 0 or not node.name().startswith(FUSED) or LEFT in engine.belongings(node):
        return None
    saved = {name: engine.saved_tensor(node, name) for name in ("query", "key", "value", "output")}
    options = {name: engine.saved_option(node, name) for name in ("dropout_p", "is_causal", "scale")}
    query, key, value, output = saved.values()
    if query is None or key is None or value is None or output is None or options["dropout_p"]:
        return None
    masks = [engine.saved_tensor(node, name) for name in ("attn_mask", "attn_bias")]
    if any(mask is not None and mask.requires_grad for mask in masks):
        return None
    module = attention(bool(options["is_causal"]), options["scale"])
    rule = REGISTRY.find(module)
    assert rule is not None
    binding = rule.bind(module, (query, key, value, *[mask for mask in masks if mask is not None]), {})
    if binding.problem:
        return None
    edges = tuple(node.next_functions[:3]) + ((None, 0),) * (len(binding.inputs) - 3)
    record = Record(module, rule, binding, binding.inputs, edges, {0: output.detach()}, {0: 0})
    engine.belongings(node)[OWNER] = record
    node.register_prehook(Visit(record))
    return record
