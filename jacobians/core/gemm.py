"""Matrix products over positions: what `out = W a` needs, sample by sample and in reused buffers.

`m` are columns `[V, N, G, O, T]` (groups `G`, output channels `O`, positions `T`), `a` patches
`[N, G, I, T]`; patches come from a function of a slice of samples, so that they exist for a few
samples at a time and stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import (
    chunks,
    is_differentiated,
    linear,
    products,
    slices,
    takes_onednn,
    times_squares,
    wide,
)

Patches = Callable[[slice], Tensor]
Empty = Callable[[Sequence[int], Tensor], Tensor]

SMALL = 1 << 19
"""From how many multiplications on a column has products of its own: fewer take less time than a call."""

PART, MOST_PARTS = 64, 6
"""The least number of rows, and the largest number of parts, in which a triangle of a symmetric product is computed."""

LONG, LARGE_PRODUCT = 256, 1 << 25
"""From how many multiplications on, for each entry and in all, this saves more than mirroring takes."""


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


Room = Callable[[Sequence[int], Tensor], Tensor | None]
"""Memory for a result of a shape, like a tensor, if there is some."""


def times_squares_of(left: Tensor, x: Tensor, per_sample: bool, room: Room) -> Tensor:
    """`left x^2` of vectors `[N, O]` and `[N, I]`: `[N, O, I]`, maybe in some `room`, or its sum over samples."""
    return outer_products(x.square(), left[None], room)[0] if per_sample else times_squares(left, x)


def outer_products(x: Tensor, m: Tensor, room: Room) -> Tensor:
    """`m x^T` for every sample, vectors `[N, I]` and columns `[..., N, O]`: `[..., N, O, I]`, maybe in some `room`."""
    left, right = m.unsqueeze(-1), x.unsqueeze(1)
    into = None if torch.is_grad_enabled() else room((*m.shape, x.shape[1]), m)
    return left * right if into is None else torch.mul(left, right, out=into)


def second_moment(patches: Patches, n: int, g: int, width: int, t: int, like: Tensor, average: bool) -> Tensor:
    """`sum_n sum_t a a^T`, averaged over groups: `[I, I]`; positions are averaged first where `average`."""

    def matrices() -> Iterator[Tensor]:
        for part in chunks(n, g * width * t // 8, like.device):
            a = wide(patches(part))
            if average:
                a = a.mean(-1, keepdim=True)
            yield a.permute(2, 0, 1, 3).flatten(1)

    total = sum_of_grams(matrices(), width, like)
    return (total / g if g > 1 else total).to(like.dtype)


def squares_of_patches(patches: Patches, n: int, g: int, width: int, t: int, like: Tensor, average: bool) -> Tensor:
    """The diagonal `[I]` of `second_moment`."""
    total = wide(like.new_zeros(width))
    for part in chunks(n, g * width * t, like.device):
        a = wide(patches(part))
        total += (a.mean(-1, keepdim=True) if average else a).square().sum((0, 1, 3))
    return (total / g).to(like.dtype)


def gram(x: Tensor, spare: Tensor | None = None) -> Tensor:
    """`x x^T` `[I, I]` of a matrix `[I, K]`, maybe in `spare` memory: other memory can take longer than the product."""
    if triangle_pays(x):
        return sum_of_grams((x,), len(x), x, spare)
    return linear(x, x) if spare is None else torch.mm(x, x.T, out=spare)


def sum_of_grams(matrices: Iterable[Tensor], rows: int, like: Tensor, spare: Tensor | None = None) -> Tensor:
    """`sum x x^T` `[I, I]` of matrices `[I, K]`: of large ones one triangle, which is mirrored then."""
    total: Tensor | None = None
    parts = list[slice]()
    for x in matrices:
        if not triangle_pays(x):
            product = linear(x, x)
            total = product if total is None else total + product
            continue
        is_new = total is None
        if total is None:
            total = x.new_empty(rows, rows) if spare is None else spare
        parts = list(slices(rows, -(-rows // min(rows // PART, MOST_PARTS))))
        for some in parts:
            add_product(total[some, : some.stop], x[some], x[: some.stop], is_new)
    if total is None:
        return wide(like.new_zeros(rows, rows))
    for some in parts[1:]:
        total[: some.start, some] = total[some, : some.start].T
    return total


def triangle_pays(x: Tensor) -> bool:
    """Whether it takes less time to compute one triangle of `x x^T`, and mirror it, than the whole."""
    rows, length = x.shape
    large = length >= LONG and rows >= 2 * PART and rows * rows * length >= LARGE_PRODUCT
    return large and x.device.type == "cpu" and not is_differentiated()


def add_product(goal: Tensor, x: Tensor, y: Tensor, is_new: bool) -> None:
    """Add `x y^T` to what is there, or overwrite it where it `is_new`."""
    if takes_onednn(x, y):
        product = linear(x, y)
        goal.copy_(product) if is_new else goal.add_(product)
    elif is_new:
        torch.mm(x, y.T, out=goal)
    else:
        goal.addmm_(x, y.T)
