"""Squared norms of what `out = W a` gives sample by sample, `|sum_t m_t a_t|^2`: by Gram matrices, or directly.

Beside these, squares in other bases: columns and patches are projected, and not what they are multiplied to.

Columns `m` `[N, G, O, T]` and patches `a` `[N, G, I, T]` are those of `gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.core import cost
from bpk.jacobians.core.gemm import Patches, fresh
from bpk.jacobians.core.numeric import at_once, cancel, chunks, linear, products, slices, squares_of_rows, wide
from bpk.jacobians.core.squares import Shown, squared_sum


def norm_squared(patches: Patches, m: Tensor, width: int, views: bool = False, shown: Shown = None) -> Tensor:
    """`|sum_t m a^T|^2` for every sample of `m` `[N, G, O, T]`: `[N]`, by Gram matrices or directly."""
    n, g, o, t = m.shape
    if t == 1:
        left, right = (squares_of_rows(wide(x).flatten(2)) for x in (m, patches(slice(0, n))))
        return (left * right).sum(1).to(m.dtype)
    size = cost.Size(1, n, g, o, width, t)
    saved = 0.0 if shown is None else cost.gradient(size) - cost.adding_up(size)
    by_grams = cost.by_grams(size) < cost.by_rows(size) - saved
    way, held = (norm_by_grams, 2 * t * t) if by_grams else (partial(norm_by_rows, shown=shown), o * width)
    step = at_once(g * (held if views else width * t + held), m.device)
    if n <= step:
        return way(wide(patches(slice(0, n))), wide(m)).to(m.dtype)
    return torch.cat([way(wide(patches(part)), wide(m[part])) for part in slices(n, step)]).to(m.dtype)


def norm_by_rows(a: Tensor, m: Tensor, shown: Shown = None) -> Tensor:
    """`norm_squared` of a few samples from individual gradients."""
    matrices = products(m.flatten(0, 1), a.flatten(0, 1))
    if shown is not None:
        shown(matrices.view(*m.shape[:2], *matrices.shape[1:]))
    return squares_of_rows(matrices.view(len(m), -1))


def norm_by_grams(a: Tensor, m: Tensor) -> Tensor:
    """The same from Gram matrices of positions: `<a^T a, m^T m>`.

    Where positions cancel (those of a constant image before a normalisation over it), little but rounding errors is
    left of these, which may be negative: then directly. On a GPU nobody waits to learn of that.
    """
    grams = [products(x.mT, x.mT) for x in (a.flatten(0, 1), m.flatten(0, 1))]
    found = torch.linalg.vecdot(*(x.view(len(m), -1) for x in grams))
    if m.device.type != "cpu":
        return found.clamp(min=0)
    traces = [x.diagonal(dim1=1, dim2=2).sum(1).view(len(m), -1) for x in grams]
    terms = torch.linalg.vecdot(*traces)
    lost = cancel(found, terms)
    for n in lost.nonzero()[:, 0] if lost.any() else ():
        some = slice(n, n + 1)
        found = found.index_copy(0, n[None], norm_by_rows(a[some], m[some]))
    return found


def projected_squares(
    patches: Patches, blocks: Sequence[Tensor], width: int, left: Tensor | None, right: Tensor | None
) -> Tensor:
    """`sum_vn (L^T m a^T R)^2` `[O, I]` for columns `m` `[V, N, 1, O, T]` and patches `a` `[N, 1, I, T]`.

    What is projected exists for a few samples at a time, and patches are projected once for all blocks.
    """
    _, n, _, outputs, t = blocks[0].shape
    total = wide(blocks[0][:0]).new_zeros(outputs, width)
    size = t * (width + outputs * sum(map(len, blocks)))
    for part in chunks(n, size, total.device) if t > 1 else [slice(0, n)]:
        a, columns = times(patches(part), right), [times(block[:, part], left) for block in blocks]
        total += squared_sum(lambda some, a=a: a[some], columns, width, None, False, fresh)[0]  # type: ignore[misc]
    return total


def times(x: Tensor, basis: Tensor | None) -> Tensor:
    """`B^T x` for `[..., D, T]`, as one product."""
    return x if basis is None else linear(x.mT, basis.to(x.dtype).T).mT
