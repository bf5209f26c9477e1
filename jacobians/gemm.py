"""Matrix products over positions: what `out = W a` needs, sample by sample and in reused buffers.

`m` are columns `[V, N, G, O, T]` (groups `G`, output channels `O`, positions `T`), `a` patches
`[N, G, I, T]`; patches come from a function of a slice of samples, so that they exist for a few
samples at a time and stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Patches = Callable[[slice], Tensor]
CACHE = 1 << 18
"""How many numbers a buffer holds that should stay in cache."""


def chunks(total: int, size: int) -> Iterator[slice]:
    """Slices of samples, as many at a time as `CACHE` holds with `size` numbers each."""
    step = max(1, CACHE // max(1, size))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def wide(x: Tensor) -> Tensor:
    """`x` in the type to accumulate in: float32 instead of a half-precision type."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def per_sample(patches: Patches, m: Tensor, width: int) -> Tensor:
    """`sum_t m a^T` for every sample: `[V, N, G, O, I]`."""
    v, n, g, o, t = m.shape
    if torch.is_grad_enabled():
        return torch.matmul(m, patches(slice(0, n)).transpose(-1, -2))
    if t == 1:
        return m * patches(slice(0, n)).transpose(-1, -2)
    out = m.new_empty(v, n, g, o, width)
    for part in chunks(n, g * width * t):
        a = patches(part).transpose(-1, -2)
        for k in range(v):
            torch.matmul(m[k, part], a, out=out[k, part])
    return out


def squared_sum(patches: Patches, m: Tensor, width: int, weights: Tensor | None, keep: bool) -> Tensor:
    """`sum_v w_vn (sum_t m a^T)^2`: `[G, O, I]`, or `[N, G, O, I]` where `keep`. No graph is built."""
    v, n, g, o, t = m.shape
    if t == 1:
        return _squared_outer(patches(slice(0, n)), m, weights, keep)
    total = torch.zeros((n if keep else 1, g, o, width), dtype=wide(m).dtype, device=m.device)
    for part in chunks(n, g * (o * width + width * t)):
        a = wide(patches(part)).transpose(-1, -2)
        buffer = None
        for k in range(v):
            buffer = torch.matmul(wide(m[k, part]), a, out=buffer) if buffer is not None else wide(m[k, part]) @ a
            second = buffer if weights is None else buffer * weights[k, part, None, None, None]
            if keep:
                total[part].addcmul_(buffer, second)
            else:
                for row, other in zip(buffer, second):
                    total[0].addcmul_(row, other)
    return (total if keep else total[0]).to(m.dtype)


def _squared_outer(a: Tensor, m: Tensor, weights: Tensor | None, keep: bool) -> Tensor:
    """One position: the square of an outer product is the outer product of the squares."""
    squares = wide(m)[..., 0].square()  # [V, N, G, O]
    if weights is not None:
        squares = squares * weights[..., None, None]
    left, right = squares.sum(0), wide(a)[..., 0].square()  # [N, G, O], [N, G, I]
    if keep:
        return (left[..., None] * right[..., None, :]).to(m.dtype)
    return torch.einsum("ngo,ngi->goi", left, right).to(m.dtype)


def norm_squared(patches: Patches, m: Tensor, width: int) -> Tensor:
    """`|sum_t m a^T|^2` for every sample of `m` `[N, G, O, T]`: `[N]`, by Gram matrices or directly."""
    n, g, o, t = m.shape
    if t == 1:
        return (wide(m).square().sum((2, 3)) * wide(patches(slice(0, n))).square().sum((2, 3))).sum(1).to(m.dtype)
    gram = t * (o + width) < o * width
    parts = []
    for part in chunks(n, g * (width * t + (2 * t * t if gram else o * width))):
        a, rows = wide(patches(part)), wide(m[part])
        if gram:
            product = (a.transpose(-1, -2) @ a) * (rows.transpose(-1, -2) @ rows)
            parts.append(product.sum((1, 2, 3)))
        else:
            parts.append((rows @ a.transpose(-1, -2)).square().sum((1, 2, 3)))
    return torch.cat(parts).to(m.dtype) if parts else m.new_zeros(0)


def second_moment(patches: Patches, n: int, g: int, width: int, t: int, like: Tensor, average: bool) -> Tensor:
    """`sum_n sum_t a a^T`, averaged over groups: `[I, I]`; positions are averaged first where `average`."""
    total = torch.zeros(width, width, dtype=wide(like).dtype, device=like.device)
    for part in chunks(n, g * width * t):
        a = wide(patches(part))
        rows = a.mean(-1) if average else a.movedim(2, -1)  # [B, G, (T,) I]
        rows = rows.reshape(-1, width)
        total = total + rows.T @ rows
    return (total / g).to(like.dtype)
