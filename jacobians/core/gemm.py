"""Matrix products over positions: what `out = W a` needs, sample by sample and in reused buffers.

`m` are columns `[V, N, G, O, T]` (groups `G`, output channels `O`, positions `T`), `a` patches
`[N, G, I, T]`; patches come from a function of a slice of samples, so that they exist for a few
samples at a time and stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import CACHE, LARGE, chunks, linear, sum_of_squares, wide

Patches = Callable[[slice], Tensor]
Empty = Callable[[Sequence[int], Tensor], Tensor]


def one_by_one(m: Tensor, width: int) -> bool:
    """Whether the products of single samples are large enough to be computed one after the other."""
    v, _, g, o, t = m.shape
    return g == 1 and m.device.type == "cpu" and v * o * width * t >= 8 * LARGE


def products(patches: Patches, blocks: Sequence[Tensor], width: int) -> Iterator[tuple[int, int, Tensor]]:
    """Sample `n`, first column `v` and `sum_t m a^T` `[v', O, I]` of it and its successors (one group).

    Columns may come in several `blocks`: a few of one sample are put side by side, never all of them.
    """
    _, n, _, o, t = blocks[0].shape
    step = max(1, min(4 * CACHE // (o * width), CACHE // (o * t)))
    parts = [part for block in blocks for part in block[:, :, 0].tensor_split(-(-len(block) // step))]
    groups: list[list[Tensor]] = []
    for part in parts:
        if not groups or sum(map(len, groups[-1])) + len(part) > step:
            groups.append([])
        groups[-1].append(part)
    for k in range(n):
        a, first = wide(patches(slice(k, k + 1))[0, 0]), 0
        for group in groups:
            m = group[0][:, k] if len(group) == 1 else torch.cat([part[:, k] for part in group])
            yield k, first, linear(wide(m).reshape(-1, t), a).view(-1, o, width)
            first += len(m)


def per_sample(patches: Patches, m: Tensor, width: int, empty: Empty) -> Tensor:
    """`sum_t m a^T` for every sample: `[V, N, G, O, I]`, in memory that `empty` hands out."""
    v, n, g, o, t = m.shape
    if torch.is_grad_enabled():
        return torch.matmul(m, patches(slice(0, n)).transpose(-1, -2))
    out = empty((v, n, g, o, width), m)
    if t == 1:
        return torch.mul(m, patches(slice(0, n)).transpose(-1, -2), out=out)
    if one_by_one(m, width):
        for k, first, buffer in products(patches, [m], width):
            out[first : first + len(buffer), k, 0] = buffer
        return out
    for part in chunks(n, g * (width * t + v * o * width), m.device):
        a = patches(part).transpose(-1, -2)
        if g > 1:
            out[:, part] = torch.matmul(m[:, part], a)
            continue
        for column, goal in zip(m, out, strict=True):
            torch.bmm(column[part, 0], a[:, 0], out=goal[part, 0])
    return out


def squared_sum_by_sample(
    patches: Patches, blocks: Sequence[Tensor], width: int, weights: Tensor | None, keep: bool, empty: Empty
) -> Tensor:
    """`squared_sum` of large products (one group), of columns in several blocks."""
    _, n, g, o, _ = blocks[0].shape
    total = empty((n if keep else 1, g, o, width), wide(blocks[0][:0])).zero_()
    scale = None if weights is None else weights.tolist()
    for k, first, buffer in products(patches, blocks, width):
        goal = total[k if keep else 0, 0]
        for j, row in enumerate(buffer, start=first):
            goal.addcmul_(row, row, value=1.0 if scale is None else scale[j][k])
    return (total if keep else total[0]).to(blocks[0].dtype)


def by_pairs(v: int, o: int, width: int, t: int) -> bool:
    """Whether squares are cheaper through pairs of positions than from the products of single columns.

    Per sample and weight, `t (t + 1) / 2` multiplications (and the Gram matrices of the columns) stand against `v t`,
    and against writing and squaring `v` products, which is slower where they do not stay in cache. Measured.
    """
    writing = 2.5 if o * width > 4 * LARGE else 1.0
    return t * (t + 1) / 2 * (1 + 3 * v / width) <= v * (10 + t / 3) * writing


def squared_sum_by_pairs(
    patches: Patches, blocks: Sequence[Tensor], width: int, weights: Tensor | None, keep: bool, empty: Empty
) -> Tensor:
    """`sum_v w_vn (sum_t m_t a_t)^2 = sum_ts (sum_v w_vn m_t m_s) (a_t a_s)`, whose cost does not grow with columns."""
    _, n, g, o, t = blocks[0].shape
    like, total = wide(blocks[0][:0]), None
    if keep:
        total = empty((n, g, o, width), like)
    for part in chunks(n, g * t * (t + 1) * (o + width) // 16, like.device):
        left, right = _pairs_of_columns(blocks, part, weights), _pairs(wide(patches(part)), double=False)
        if total is not None and keep:
            torch.matmul(left, right.transpose(2, 3), out=total[part])
            continue
        if g == 1:
            found = linear(_beside(left[:, 0]), _beside(right[:, 0]))[None]
        else:
            found = torch.einsum("bgop,bgip->goi", left, right)
        total = found if total is None else total.add_(found)
    assert total is not None
    if weights is None:
        total.clamp_(min=0)  # rounding may leave tiny negative numbers
    return total.to(blocks[0].dtype)


def _beside(x: Tensor) -> Tensor:
    """`[B, O, P]` as `[O, B P]`."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def _pairs(x: Tensor, double: bool, other: Tensor | None = None) -> Tensor:
    """Products `x_t y_s` `[..., P]` of pairs of positions `t <= s` (`y`: `other`, or `x`); pairs `t < s` doubled."""
    t, y = x.shape[-1], x if other is None else other
    out, start = x.new_empty(*x.shape[:-1], t * (t + 1) // 2), 0
    for gap in range(t):
        here = out[..., start : start + t - gap]
        torch.mul(x[..., : t - gap], y[..., gap:], out=here)
        start += t - gap
    if double:
        out[..., t:] *= 2
    return out


def _pairs_of_columns(blocks: Sequence[Tensor], part: slice, weights: Tensor | None) -> Tensor:
    """`sum_v w_vn m_t m_s` `[B, G, O, P]` for pairs of positions, doubled where `t < s`."""
    total: Tensor | None = None
    start = 0
    for block in blocks:
        m = scaled = wide(block[:, part])
        if weights is not None:
            scaled = m * weights[start : start + len(m), part, None, None, None]
        start += len(m)
        if len(m) == 1:
            found = _pairs(scaled[0], True, m[0])
        else:
            gram = torch.matmul(scaled.permute(1, 2, 3, 4, 0), m.permute(1, 2, 3, 0, 4))  # [B, G, O, T, T]
            bands = [gram.diagonal(gap, -2, -1) for gap in range(gram.shape[-1])]
            found = torch.cat([bands[0], *(2 * band for band in bands[1:])], -1)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def squared_sum(patches: Patches, m: Tensor, width: int, weights: Tensor | None, keep: bool, empty: Empty) -> Tensor:
    """`sum_v w_vn (sum_t m a^T)^2`: `[G, O, I]`, or `[N, G, O, I]` where `keep`. No graph is built."""
    v, n, g, o, t = m.shape
    if t == 1:
        return _squared_outer(patches(slice(0, n)), m, weights, keep, empty)
    if by_pairs(v, o, width, t):
        return squared_sum_by_pairs(patches, [m], width, weights, keep, empty)
    if one_by_one(m, width):
        return squared_sum_by_sample(patches, [m], width, weights, keep, empty)
    total = empty((n if keep else 1, g, o, width), wide(m[:0])).zero_()
    for part in chunks(n, g * (v * o * width + width * t), m.device):
        buffer = torch.matmul(wide(m[:, part]), wide(patches(part)).transpose(-1, -2)).square_()
        if weights is not None:
            buffer *= weights[:, part, None, None, None]
        if keep:
            total[part] = buffer.sum(0)
        else:
            total[0] += buffer.sum((0, 1))
    return (total if keep else total[0]).to(m.dtype)


def _squared_outer(a: Tensor, m: Tensor, weights: Tensor | None, keep: bool, empty: Empty) -> Tensor:
    """One position: the square of an outer product is the outer product of the squares."""
    left, right = sum_of_squares(m[..., 0], weights), wide(a)[..., 0].square()  # [N, G, O], [N, G, I]
    if keep:
        left, right = left[..., None], right[..., None, :]
        out = empty((*left.shape[:3], right.shape[-1]), left)
        return torch.mul(left, right, out=out).to(m.dtype)
    if left.shape[1] == 1:
        return linear(left[:, 0].T, right[:, 0].T)[None].to(m.dtype)
    return torch.einsum("ngo,ngi->goi", left, right).to(m.dtype)


def squared_length(x: Tensor) -> Tensor:
    """Squared norms `[N, G]` over the last two axes."""
    if torch.is_grad_enabled():
        return wide(x).square().sum((2, 3))
    return torch.linalg.vector_norm(wide(x), dim=(2, 3)).square()


def norm_squared(patches: Patches, m: Tensor, width: int) -> Tensor:
    """`|sum_t m a^T|^2` for every sample of `m` `[N, G, O, T]`: `[N]`, by Gram matrices or directly."""
    n, g, o, t = m.shape
    if t == 1:
        return (squared_length(m) * squared_length(patches(slice(0, n)))).sum(1).to(m.dtype)
    gram = t * (o + width) < o * width
    parts = []
    if one_by_one(m[None], min(width, t)) and not torch.is_grad_enabled():
        for k in range(n):
            a, rows = wide(patches(slice(k, k + 1))[0, 0]), wide(m[k, 0])
            left, right = (linear(a.T, a.T), linear(rows.T, rows.T)) if gram else (linear(rows, a),) * 2
            parts.append(torch.dot(left.view(-1), right.view(-1)))
        return torch.stack(parts).to(m.dtype)
    for part in chunks(n, g * (width * t + (2 * t * t if gram else o * width)), m.device):
        a, rows = wide(patches(part)), wide(m[part])
        if gram:
            product = (a.transpose(-1, -2) @ a) * (rows.transpose(-1, -2) @ rows)
            parts.append(product.sum((1, 2, 3)))
        else:
            parts.append((rows @ a.transpose(-1, -2)).square().sum((1, 2, 3)))
    return torch.cat(parts).to(m.dtype) if parts else m.new_zeros(0)


def second_moment(patches: Patches, n: int, g: int, width: int, t: int, like: Tensor, average: bool) -> Tensor:
    """`sum_n sum_t a a^T`, averaged over groups: `[I, I]`; positions are averaged first where `average`."""
    total: Tensor | None = None
    for part in chunks(n, g * width * t // 8, like.device):
        a = wide(patches(part))
        if average:
            a = a.mean(-1, keepdim=True)
        total = _add_gram(total, a.permute(2, 0, 1, 3).reshape(width, -1))
    if total is None:
        return like.new_zeros(width, width)
    return (total / g if g > 1 else total).to(like.dtype)


def _add_gram(total: Tensor | None, x: Tensor) -> Tensor:
    """`total + x x^T`; a large one some rows at a time, so that products stay in cache until they are added."""
    step = 4 * CACHE // max(1, len(x)) if x.device.type == "cpu" and not torch.is_grad_enabled() else len(x)
    if len(x) <= step:
        product = linear(x, x)
        return product if total is None else total + product
    into = x.new_empty(len(x), len(x)) if total is None else total
    for rows, goal in zip(x.split(max(1, step)), into.split(max(1, step)), strict=True):
        product = linear(rows, x)
        goal.copy_(product) if total is None else goal.add_(product)
    return into
