"""Attention as torch's kernel for processors has computed it: what the kernel has kept need not be computed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.attention.attention import Triple
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.engine import attention_backward
from bpk.jacobians.core.numeric import is_differentiated

MANY_WEIGHTS = 1 << 12
"""From how many weights of one head on the kernel takes less time than products with weights that are written out."""


@dataclass(frozen=True)
class Fused:
    """Queries, keys, values and output `[N, H, T, d]`, what the kernel has kept beside them, and its options."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logsumexp: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    @property
    def heads(self) -> Triple:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def count(self) -> int:
        """`H`."""
        return self.query.shape[1]

    def pays(self, columns: int) -> bool:
        """Whether the kernel takes less time for so many columns, one after the other, than products of all of them."""
        return columns == 1 or self.query.shape[2] * self.key.shape[2] >= MANY_WEIGHTS

    def pull(self, columns: Tensor) -> Triple:
        """From columns `[V, N, H, L, d]` at the output to queries, keys and values; weights are not written out."""
        kept = (self.query, self.key, self.value, self.output, self.logsumexp, self.mask)
        found = [attention_backward(column, *kept, self.causal, self.scale) for column in columns]
        if len(found) == 1:
            q, k, v = found[0]
            return q[None], k[None], v[None]
        q, k, v = map(torch.stack, zip(*found, strict=True))
        return q, k, v


def kept_by_kernel(call: Call, heads: int, causal: bool, scale: float) -> Fused | None:
    """What the kernel has kept of a call without dropout; `None` where another way was taken, or a graph is built.

    It is read while autograd's graph is there (`Rule.capture`), and kept for later.
    """
    return None if is_differentiated() else call.memo("fused", lambda: read(call, heads, causal, scale))


def read(call: Call, heads: int, causal: bool, scale: float) -> Fused | None:
    """Look it up."""
    kept = None if call.saved is None else call.saved("logsumexp")
    if call.saved is None or kept is None or kept.device.type != "cpu":
        return None
    query, key, value, output, mask = map(call.saved, ("query", "key", "value", "output", "attn_mask"))
    if query is None or key is None or value is None or output is None:
        return None
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2] == (call.batch_size, heads)
    typed = {x.dtype for x in (query, key, value, output, *(() if mask is None else (mask,)))} == {call.output.dtype}
    return Fused(query, key, value, output, kept, mask, causal, scale) if alike and typed else None
