"""Individual gradients as sums of outer products: their inner products, and products with matrices, without them.

A weight that multiplies patches has the rows `r_vn = sum_t m_vnt a_nt^T`, with columns `m` `[V, N, G, O, T]` at the
layer's output and patches `a` `[N, G, I, T]`. Each function takes the cheaper of two ways: products of positions with
positions, or rows, of some output channels or of some samples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bpk.jacobians.core import gemm
from bpk.jacobians.core.numeric import cancel, is_differentiated, linear, products, times_each, wide
from bpk.jacobians.core.side_by_side import concatenated

ROOM = 1 << 22
"""How many numbers rows, or products of positions, hold at a time."""

Some = slice | Tensor
"""Which samples: a slice, or their numbers."""


@dataclass(frozen=True)
class Outer:
    """Rows `[V, N, G, O, I]` of a weight, as `sum_t m a^T`.

    `patches` gives `[B, G, I, T]` of some samples, with `I` the `width`; `matrix` shows weights `[..., *p]`, or a part
    of each, as `[..., G, O, I]`.
    """

    columns: Tensor
    patches: Callable[[Some], Tensor]
    width: int
    matrix: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """`V, N, G, O, I, T`."""
        v, n, g, o, t = self.columns.shape
        return v, n, g, o, self.width, t

    def rows(self, samples: slice = slice(None), g: int = 0) -> Tensor:
        """`[B, V, O, I]`: rows of some samples of a group."""
        return rows_of([self], samples, g, slice(None))

    def rotated(self, left: Tensor, right: Tensor) -> Outer:
        """`left r right^T` for all rows, with `left` `[O', G O]` and `right` `[I', I]`; groups count as positions."""
        v, n, g, o, _, t = self.shape
        by_group = left.reshape(len(left), g, o).to(wide(self.columns).dtype)
        if g == t == 1:
            columns = times(wide(self.columns).flatten(2).transpose(0, 1), by_group[:, 0].T).transpose(0, 1)
        else:
            columns = torch.einsum("pgo,vngot->vnpgt", by_group, wide(self.columns))
        columns = columns.reshape(v, n, 1, len(left), g * t)

        def patches(samples: Some) -> Tensor:
            a = wide(self.patches(samples)).transpose(1, 2).flatten(2)[:, None]
            return times_each(right.to(a.dtype)[None, None], a)[0]

        return replace(self, columns=columns, patches=patches, width=len(right))


def rows_of(blocks: Sequence[Outer], samples: slice, g: int, channels: slice) -> Tensor:
    """`[B, V, o, I]`: rows of some samples and channels of a group, their patches made a few at a time.

    All blocks of columns have the same patches.
    """
    first, (start, stop, _) = blocks[0], samples.indices(blocks[0].shape[1])
    by_sample = [wide(b.columns[:, start:stop, g, channels]).transpose(0, 1) for b in blocks]  # patches are not copied
    columns = concatenated(by_sample, 1)
    if torch.is_grad_enabled():
        return torch.matmul(columns, wide(first.patches(slice(start, stop))[:, None, g]).mT)
    rows = columns.new_empty(*columns.shape[:3], first.width)
    for part in pieces(start, stop, first.width * first.shape[-1]):
        here = slice(part.start - start, part.stop - start)
        products(columns[here].flatten(1, 2), wide(first.patches(part)[:, g]), out=rows[here].flatten(1, 2))
    return rows


def pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices from `start` to `stop`, of as many things as there is room for with `size` numbers each."""
    step = max(1, ROOM // max(1, size))
    for k in range(start, stop, step):
        yield slice(k, min(k + step, stop))


def times(x: Tensor, y: Tensor) -> Tensor:
    """`x y`, for `x` `[B, V, K]`: scaled rows of `y` where `x` is diagonal, as columns are at a model's last layer."""
    if x.shape[1] == x.shape[2] and not is_differentiated():
        diagonal = x.diagonal(dim1=1, dim2=2)
        if bool(x.count_nonzero() == diagonal.count_nonzero()):
            return diagonal[..., None] * y
    return x @ y


def gram(blocks: Sequence[Outer], left: slice, right: slice, aligned: bool) -> Tensor:
    """Inner products of the rows of some samples with those of others: `[V, n, V, m]`, or `[V, n, m]` if `aligned`.

    Blocks of columns, which have the same patches, are side by side for a few channels or samples at a time only.
    `aligned` takes each column with itself only.
    """
    _, samples, groups, o, i, t = blocks[0].shape
    v, n, m = sum(len(b.columns) for b in blocks), len(range(samples)[left]), len(range(samples)[right])
    lead = v if aligned else 1
    pairs = lead * (v // lead) ** 2
    by_positions = n * m * t * t * (i + pairs * (o + 1))
    by_rows = pairs * n * m * o * i + v * (n + (m if left != right else 0)) * t * o * i
    way = _by_rows if t > 1 and (by_rows < by_positions or pairs * t * t > ROOM) else _by_positions
    total = wide(blocks[0].columns[:0]).new_zeros(lead, v // lead, n, v // lead, m)
    for g in range(groups if n and m and v and t else 0):
        way(blocks, left, right, g, total)
    return total.view(v, n, m) if aligned else total[0]


def _by_positions(blocks: Sequence[Outer], left: slice, right: slice, g: int, total: Tensor) -> None:
    """`<r, r'> = sum_ts <m_t, m'_s> <a_t, a'_s>`."""
    lead, q, n, _, m = total.shape
    patches, (_, samples, *_, t) = blocks[0].patches, blocks[0].shape
    first, second = (s.indices(samples)[0] for s in (left, right))
    step = max(1, int((ROOM / (lead * q * q * t * t)) ** 0.5))
    for j in range(0, m, step):
        theirs = slice(second + j, second + min(j + step, m))
        x, mine = (_flat(y, lead) for y in (patches(theirs)[None, :, g], _some(blocks, theirs, g)))
        for k in range(0, n, step):
            if left == right and k > j:  # by symmetry
                continue
            here = slice(first + k, first + min(k + step, n))
            y, ours = (_flat(z, lead) for z in (patches(here)[None, :, g], _some(blocks, here, g)))
            b, c = here.stop - here.start, theirs.stop - theirs.start
            between = (y[0] @ x[0].mT).view(b, t, 1, c, t)
            found = (ours @ mine.mT).view(lead, q, b, t, q, c, t)
            found = found * between if torch.is_grad_enabled() else found.mul_(between)
            found = found.sum((3, 6)) if t > 1 else found.squeeze(6).squeeze(3)
            total[:, :, k : k + b, :, j : j + c] += found
            if left == right and k < j:
                total[:, :, j : j + c, :, k : k + b] += found.permute(0, 3, 4, 1, 2)


def _some(blocks: Sequence[Outer], samples: slice, g: int) -> Tensor:
    """Columns `[V, B, O, T]` of some samples."""
    return concatenated([b.columns[:, samples, g] for b in blocks])


def _flat(x: Tensor, lead: int) -> Tensor:
    """`[V, B, O, T]` as `[lead, (V / lead) B T, O]`; patches `[1, B, I, T]` as `[1, B T, I]`."""
    lead = lead if len(x) > 1 else 1
    return wide(x).transpose(2, 3).reshape(lead, len(x) // lead * x.shape[1] * x.shape[3], x.shape[2])


def _by_rows(blocks: Sequence[Outer], left: slice, right: slice, g: int, total: Tensor) -> None:
    """From the rows of some output channels at a time."""
    _, q, n, _, m = total.shape
    v, (*_, o, i, t) = total.shape[0] * q, blocks[0].shape
    for part in pieces(0, o, v * (n if left == right else n + m) * max(i, t)):
        ours = rows_of(blocks, left, g, part).flatten(2)
        theirs = ours if left == right else rows_of(blocks, right, g, part).flatten(2)
        if q == v:
            x, y = ours.flatten(0, 1), theirs.flatten(0, 1)
            total[0] += (gemm.gram(x) if left == right else linear(x, y)).view(n, v, m, v).permute(1, 0, 3, 2)
        else:
            total[:, 0, :, 0] += ours.transpose(0, 1) @ theirs.permute(1, 2, 0)
        del ours, theirs  # before the next ones are there


def sample_gram(outer: Outer, weight: Tensor | None) -> Tensor:
    """`sum_e w_e r_vne r_une`, the rows of one sample with one another: `[N, V, V]`; `weight` is `[G, O, I]`."""
    v, n, groups, o, i, t = outer.shape
    total = wide(outer.columns).new_zeros(n, v, v)
    weight = None if weight is None else wide(weight)
    by_positions = t == 1 or (weight is None and t * t * i + v * o * t * t + v * v * o * t < v * o * i * (t + v))
    for g in range(groups):
        if not by_positions:
            for part in pieces(0, n, v * o * i):
                rows = outer.rows(part, g)
                scaled = rows if weight is None else rows * weight[g]
                total[part] += scaled.flatten(2) @ rows.flatten(2).mT
            continue
        for part in pieces(0, n, max(v * o * t, i * t, t * t)):
            a, m = wide(outer.patches(part)[:, g]), wide(outer.columns[:, part, g]).transpose(0, 1)  # [B, V, O, T]
            if weight is None:
                scaled = (m.flatten(1, 2) @ (a.mT @ a)).view_as(m)
            else:
                scaled = m * (a[..., 0].square() @ weight[g].T)[:, None, :, None]
            total[part] += times(scaled.flatten(2), m.flatten(2).mT)
    return total


def norms(outer: Outer) -> Tensor:
    """Squared norms of all rows: `[V, N]`; by positions `<m K, m>` with `K = a^T a`, which all columns share."""
    v, n, groups, o, i, t = outer.shape
    total, by_positions = wide(outer.columns).new_zeros(v, n), t <= i
    for g in range(groups):
        for part in pieces(0, n, max(v * o * max(t, 0 if by_positions else i), i * t)):
            total[:, part] += (norms_by_positions if by_positions else norms_by_rows)(outer, part, g)
    return total


def norms_by_positions(outer: Outer, samples: slice, g: int) -> Tensor:
    """Those of some samples of a group, by rows where positions cancel (on a GPU nobody waits to learn of that)."""
    a, m = wide(outer.patches(samples)[:, g]), wide(outer.columns[:, samples, g])
    between = a.mT @ a
    seen = (between @ m.mT).mT if m.stride(3) > 1 else m @ between  # in the order of memory that columns have
    found = (seen * m).sum((2, 3))
    if m.device.type != "cpu":
        return found.clamp(min=0)
    lost = cancel(found, m.square().sum((2, 3)) * between.diagonal(dim1=1, dim2=2).sum(1))
    for k in lost.any(0).nonzero()[:, 0].tolist() if lost.any() else ():
        some = slice(samples.start + k, samples.start + k + 1)
        found = found.index_copy(1, torch.tensor([k]), norms_by_rows(outer, some, g))
    return found


def norms_by_rows(outer: Outer, samples: slice, g: int) -> Tensor:
    """The same from rows."""
    return outer.rows(samples, g).square().sum((2, 3)).T


def along(outer: Outer, directions: Tensor) -> Tensor:
    """Inner products of rows with directions `[K, *p]`: `[V, N, K]`."""
    v, n, groups, o, i, t = outer.shape
    k, mats = len(directions), wide(outer.matrix(directions))
    total = wide(outer.columns).new_zeros(v, n, k)
    by_rows = v * i * (t + k) < t * k * i + v * k * t
    for g in range(groups):
        d = mats[:, g]
        for part in pieces(0, n, v * o * i if by_rows else k * o * t):
            if by_rows:
                total[:, part] += linear(outer.rows(part, g).flatten(2), d.flatten(1)).transpose(0, 1)
                continue
            a = wide(outer.patches(part)[:, g, None])  # [B, 1, I, T]
            seen = times_each(d.flatten(0, 1)[None, None], a).reshape(len(a), k, o * t)
            m = wide(outer.columns[:, part, g]).transpose(0, 1).flatten(2)  # [B, V, O T]
            total[:, part] += times(m, seen.mT).transpose(0, 1)
    return total
