"""Matrix products over positions: what `out = W a` needs, sample by sample and in reused buffers.

`m` are columns `[V, N, G, O, T]` (groups `G`, output channels `O`, positions `T`), `a` patches
`[N, G, I, T]`; patches come from a function of a slice of samples, so that they exist for a few
samples at a time and stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import CACHE, chunks, linear, products, wide

Patches = Callable[[slice], Tensor]
Empty = Callable[[Sequence[int], Tensor], Tensor]

SMALL = 1 << 19
"""From how many multiplications on a column has products of its own: fewer take less time than a call."""


def fresh(shape: Sequence[int], like: Tensor) -> Tensor:
    """New memory."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def per_sample(patches: Patches, m: Tensor, width: int, empty: Empty, views: bool = False) -> Tensor:
    """`sum_t m a^T` for every sample: `[V, N, G, O, I]`, in memory that `empty` hands out.

    Patches that are `views` take no memory, however many samples they are of.
    """
    v, n, g, o, t = m.shape
    if torch.is_grad_enabled():
        return torch.matmul(m, patches(slice(0, n)).transpose(-1, -2))
    out = empty((v, n, g, o, width), m)
    if t == 1:
        return torch.mul(m, patches(slice(0, n)).transpose(-1, -2), out=out)
    if v > 1 and n * g * o * width * t < SMALL:
        for part in chunks(n, g * (width * t + v * o * (width + t)), m.device):
            found = m[:, part].permute(1, 2, 0, 3, 4).flatten(2, 3) @ patches(part).mT
            out[:, part] = found.unflatten(2, (v, o)).permute(2, 0, 1, 3, 4)
        return out
    for part in chunks(n, 0 if views else g * (width * t + v * o * width), m.device):
        a = patches(part).flatten(0, 1)
        for column, goal in zip(m[:, part], out[:, part], strict=True):
            products(column.flatten(0, 1), a, out=goal.flatten(0, 1))
    return out


def outer_products(x: Tensor, m: Tensor, room: Callable[[Sequence[int], Tensor], Tensor | None]) -> Tensor:
    """`m x^T` for every sample, with vectors `[N, I]` and columns `[V, N, O]`: `[V, N, O, I]`, maybe in some `room`."""
    left, right = m.unsqueeze(-1), x.unsqueeze(1)
    into = None if torch.is_grad_enabled() else room((*m.shape, x.shape[1]), m)
    return left * right if into is None else torch.mul(left, right, out=into)


def second_moment(patches: Patches, n: int, g: int, width: int, t: int, like: Tensor, average: bool) -> Tensor:
    """`sum_n sum_t a a^T`, averaged over groups: `[I, I]`; positions are averaged first where `average`."""
    total: Tensor | None = None
    for part in chunks(n, g * width * t // 8, like.device):
        a = wide(patches(part))
        if average:
            a = a.mean(-1, keepdim=True)
        total = gram(a.permute(2, 0, 1, 3).flatten(1), total)
    if total is None:
        return like.new_zeros(width, width)
    return (total / g if g > 1 else total).to(like.dtype)


def gram(x: Tensor, total: Tensor | None = None, spare: Tensor | None = None) -> Tensor:
    """`x x^T`, added to `total`; a large one some rows at a time: products stay in cache until they are added.

    A new one may be in `spare` memory: to touch other memory can take longer than the product.
    """
    rows = x.shape[0]
    step = 4 * CACHE // max(1, rows) if x.device.type == "cpu" and not torch.is_grad_enabled() else rows
    if rows <= step:
        if total is None and spare is not None:
            return torch.mm(x, x.T, out=spare)
        product = linear(x, x)
        return product if total is None else total + product
    if total is None:
        into = x.new_empty(rows, rows) if spare is None else spare
    else:
        into = total
    for some, goal in zip(x.split(max(1, step)), into.split(max(1, step)), strict=True):
        product = linear(some, x)
        goal.copy_(product) if total is None else goal.add_(product)
    return into
