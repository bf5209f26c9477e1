"""Squares of what `out = W a` gives sample by sample: `sum_v w_vn (sum_t m_t a_t)^2`, in reused buffers.

Columns `m` `[V, N, G, O, T]` and patches `a` `[N, G, I, T]` are those of `gemm`. Squares need products with every
column, or those of pairs of positions, however many columns there are:

    sum_v w_v (sum_t m_vt a_t)^2 = sum_ts (sum_v w_v m_vt m_vs) (a_t a_s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core import cost
from bpk.jacobians.core.gemm import Empty, Patches, per_sample
from bpk.jacobians.core.numeric import (
    CACHE,
    LARGE,
    at_once,
    cancel,
    chunks,
    go_one_by_one,
    linear,
    products,
    sum_of_squares,
    times_squares,
    wide,
)
from bpk.jacobians.core.side_by_side import concatenated

SQUARED_ALONE = LARGE // 2
"""From how many numbers on a row is squared and added on its own, without a buffer for its square."""


Shown = Callable[[Tensor], None] | None
"""Wants to see the rows `[B, G, O, I]` of a single column, of all samples, some at a time."""


def squared_sum(
    patches: Patches,
    blocks: Sequence[Tensor],
    width: int,
    weights: Tensor | None,
    keep: bool,
    empty: Empty,
    shown: Shown = None,
) -> Tensor:
    """`sum_v w_vn (sum_t m a^T)^2`: `[G, O, I]`, or `[N, G, O, I]` where `keep`. No graph is built.

    Columns may come in several blocks: a few of one sample are put side by side, never all of them.
    """
    _, n, g, o, t = blocks[0].shape
    if t == 1:
        m = concatenated(blocks)
        return _squared_outer(patches(slice(0, n)), m, weights, keep, empty)
    size = cost.Size(sum(map(len, blocks)), n, g, o, width, t, keep)
    if shown is None and cost.by_pairs(size) < cost.by_columns(size):
        found = by_pairs(patches, blocks, width, weights, keep, empty)
        if found is not None:
            return found
    return by_columns(patches, blocks, width, weights, keep, empty, shown)


def by_columns(
    patches: Patches,
    blocks: Sequence[Tensor],
    width: int,
    weights: Tensor | None,
    keep: bool,
    empty: Empty,
    shown: Shown = None,
) -> Tensor:
    """`squared_sum` from the products with every column."""
    _, n, g, o, t = blocks[0].shape
    single = len(blocks) == len(blocks[0]) == 1
    if single and weights is None and not keep and n * g * o * max(width, t) <= CACHE and o * width < SQUARED_ALONE:
        rows = products(wide(blocks[0][0]).flatten(0, 1), wide(patches(slice(0, n))).flatten(0, 1)).view(n, g, o, width)
        if shown is not None:
            shown(rows)
        return rows.square_().sum(0).to(blocks[0].dtype)
    if single and keep:
        only = per_sample(lambda samples: wide(patches(samples)), wide(blocks[0]), width, empty)[0]
        if shown is not None:
            shown(only)
        only.square_()
        return (only if weights is None else only.mul_(weights[0, :, None, None, None])).to(blocks[0].dtype)
    total = empty((n if keep else 1, g, o, width), wide(blocks[0][:0])).zero_()
    for part, first, m in _columns(blocks, width):
        a, v = wide(patches(part)), len(m)
        goal = total[part] if keep else total
        scale = None if weights is None else weights[first : first + v, part]
        rows = products(_side_by_side(m), a.flatten(0, 1)).view(len(a), g, v, o * width)  # [B, G, V, O I]
        if shown is not None:
            shown(rows.view(len(a) * v, g, o, width))
        _add_squares(goal.view(len(goal), g, o * width), rows, scale, keep)
    return (total if keep else total[0]).to(blocks[0].dtype)


def _columns(blocks: Sequence[Tensor], width: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Samples, number of the first column, and columns `[v, B, G, O, T]`, as many as a buffer holds products of."""
    _, n, g, o, t = blocks[0].shape
    size, device, columns = g * o * max(width, t), blocks[0].device, sum(map(len, blocks))
    alone = go_one_by_one(columns * o * width * t)  # then several samples at once would be copied together
    for part in chunks(n, max(columns * size, CACHE if alone else 0), device):
        step, first = at_once((part.stop - part.start) * size, device), 0
        for group in grouped([piece for block in blocks for piece in block[:, part].split(step)], step):
            m = concatenated(group)
            yield part, first, wide(m)
            first += len(m)


def grouped(pieces: Sequence[Tensor], step: int) -> Iterator[list[Tensor]]:
    """Pieces in order, as many at a time as have up to `step` columns together."""
    group: list[Tensor] = []
    for piece in pieces:
        if group and sum(map(len, group)) + len(piece) > step:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _side_by_side(m: Tensor) -> Tensor:
    """Columns `[V, B, G, O, T]` as `[B G, V O, T]`, those of one sample side by side."""
    v, b, g, o, t = m.shape
    if m.stride(3) == 1 < o:  # positions before features: these stay side by side
        return m.permute(1, 2, 4, 0, 3).reshape(b * g, t, v * o).mT
    return m.permute(1, 2, 0, 3, 4).reshape(b * g, v * o, t)


def _add_squares(goal: Tensor, rows: Tensor, weights: Tensor | None, keep: bool) -> None:
    """Add the weighted squares of rows `[B, G, V, P]` to a goal `[B, G, P]`, or `[1, G, P]`; rows are overwritten."""
    b, g, v, size = rows.shape
    if size >= SQUARED_ALONE and g == 1 and rows.device.type == "cpu":
        factors = None if weights is None else weights.tolist()
        for k, of_sample in enumerate(rows[:, 0]):
            for j, row in enumerate(of_sample):
                goal[k if keep else 0, 0].addcmul_(row, row, value=1.0 if factors is None else factors[j][k])
        return
    scale = rows.new_ones(b, v) if weights is None else weights.T.to(rows.dtype)
    rows.square_()
    if keep:
        goal += torch.matmul(scale[:, None, None], rows)[:, :, 0]
    elif g == 1:
        goal[0, 0].addmv_(rows.view(scale.numel(), size).T, scale.reshape(-1))
    else:
        goal[0] += torch.einsum("bv,bgvp->gp", scale, rows)


def by_pairs(
    patches: Patches, blocks: Sequence[Tensor], width: int, weights: Tensor | None, keep: bool, empty: Empty
) -> Tensor | None:
    """`squared_sum` from pairs of positions, whose cost hardly grows with columns.

    `None`: these cancel, up to rounding errors. On a GPU nobody waits to learn of that.
    """
    _, n, g, o, t = blocks[0].shape
    total = empty((n if keep else 1, g, o, width), wide(blocks[0][:0]))
    diagonal, terms, waits = _diagonal(t), list[Tensor](), total.device.type == "cpu"
    for part in chunks(n, g * t * (t + 1) * (o + width) // 16, total.device):
        left, right = _pairs_of_columns(blocks, part, weights), _pairs(wide(patches(part))).mul_(2)
        right[..., diagonal] /= 2  # a position with itself counts once
        if waits:
            terms.append((left[..., diagonal].sum((2, 3)).abs() * right[..., diagonal].sum((2, 3))).sum(1))
        if keep:
            torch.matmul(left, right.mT, out=total[part])
            continue
        if g == 1:
            found = linear(_beside(left[:, 0]), _beside(right[:, 0]))
        else:
            found = torch.einsum("bgop,bgip->goi", left, right)
        total[0] = found if part.start == 0 else total[0] + found
    if waits:
        sizes = torch.cat(terms) if keep else torch.cat(terms).sum(0, keepdim=True)
        if bool(cancel(torch.linalg.vector_norm(total, 1, dim=(1, 2, 3)), sizes).any()):
            return None
    if weights is None:
        total.clamp_(min=0)  # rounding may leave tiny negative numbers
    return (total if keep else total[0]).to(blocks[0].dtype)


def _beside(x: Tensor) -> Tensor:
    """`[B, O, P]` as `[O, B P]`."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def _diagonal(t: int) -> list[int]:
    """The numbers of those pairs `t <= s`, in order, that are a position with itself."""
    return [k * t - k * (k - 1) // 2 for k in range(t)]


def _pairs(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Products `x_t x_s` `[B, G, I, P]` of pairs of positions `t <= s`, in the order of memory that `x` has."""
    (b, g, i, t), y = x.shape, x if scale is None else x * scale
    size = t * (t + 1) // 2
    out = x.new_empty(b, g, size, i).mT if x.stride(2) == 1 < i else x.new_empty(b, g, i, size)
    for k, start in enumerate(_diagonal(t)):
        torch.mul(x[..., k : k + 1], y[..., k:], out=out[..., start : start + t - k])
    return out


def _pairs_of_columns(blocks: Sequence[Tensor], part: slice, weights: Tensor | None) -> Tensor:
    """`sum_v w_vn m_t m_s` `[B, G, O, P]` for pairs of positions."""
    total: Tensor | None = None
    start, t = 0, blocks[0].shape[-1]
    for block in blocks:
        m = wide(block[:, part])
        scale = None if weights is None else weights[start : start + len(m), part, None, None, None]
        start += len(m)
        if len(m) == 1:
            found = _pairs(m[0], None if scale is None else scale[0])
        else:
            m = m.permute(1, 2, 3, 0, 4).contiguous()  # [B, G, O, V, T]
            right = m if scale is None else m * scale.permute(1, 2, 3, 0, 4)
            upper = torch.triu_indices(t, t, device=m.device)
            found = torch.matmul(m.mT, right).flatten(3).index_select(3, upper[0] * t + upper[1])
        total = found if total is None else total + found
    assert total is not None
    return total


def _squared_outer(a: Tensor, m: Tensor, weights: Tensor | None, keep: bool, empty: Empty) -> Tensor:
    """One position: the square of an outer product is the outer product of the squares."""
    left, right = sum_of_squares(m[..., 0], weights), wide(a)[..., 0]  # [N, G, O], [N, G, I]
    if keep:
        left, right = left[..., None], right.square()[..., None, :]
        out = empty((*left.shape[:3], right.shape[-1]), left)
        return torch.mul(left, right, out=out).to(m.dtype)
    if left.shape[1] == 1:
        return times_squares(left[:, 0], right[:, 0])[None].to(m.dtype)
    return torch.einsum("ngo,ngi->goi", left, right.square()).to(m.dtype)
