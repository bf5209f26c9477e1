"""Dropout of attention weights: which ones were dropped is drawn once more, and believed if the output agrees.

Behind the softmax, weights `p` become `p * keep`, where `keep` is `1 / (1 - rate)`, or 0 for what is dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState

REASON = "it drops attention weights at random, and which ones is not known after the forward pass."
WAY_OUT = (
    "call .eval() on the layer, or set its dropout = 0.0 (nn.Dropout elsewhere may stay); on a GPU, a forward pass "
    "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) makes it known."
)


def unknown(name: str) -> UnsupportedLayer:
    """What is raised where the mask cannot be had."""
    return UnsupportedLayer(f"{name} cannot be differentiated.", REASON, WAY_OUT)


def redrawn(before: RandomState, rate: float, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """`keep` `[N, H, L, S]` as torch draws it for weights of this shape and `dtype`, by a plain call of dropout."""
    with before.again(), torch.no_grad():
        return F.dropout(torch.ones(weights.shape, dtype=dtype, device=weights.device), rate).to(weights.dtype)


def probed(before: RandomState, rate: float, query: Tensor, keys: int, masked: bool, causal: bool) -> Tensor:
    """`keep`, read off torch's own kernel: with queries and keys of zeros, all weights are alike.

    Values are columns of the identity, as many at a time as a value has entries; every call draws the same numbers.
    `query` is `[N, H, L, d]`, and `rate` less than 1. Where `causal`, what no query sees counts as dropped.
    """
    n, heads, length, size = query.shape
    q, k = query.new_zeros(query.shape), query.new_zeros(n, heads, keys, size)
    mask = query.new_zeros(n, heads, length, keys) if masked else None
    identity, kept = torch.eye(keys, dtype=query.dtype, device=query.device), []
    for columns in F.pad(identity, (0, -keys % size)).split(size, 1):
        v = columns.expand(n, heads, keys, size).contiguous()
        with before.again(), torch.enable_grad():  # kernels are chosen as in a forward pass that is recorded
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            kept.append(F.scaled_dot_product_attention(q, k, v, mask, rate, causal).detach() != 0)
    return torch.cat(kept, -1)[..., :keys].to(query.dtype) / (1 - rate)
