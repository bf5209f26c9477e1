"""Which entries a second derivative couples (of a layer, a loss, a stretch), found by a few products with it.

A symmetric matrix `A` is block-diagonal over the values of a label of its entries if and only if
`A diag(f) = diag(f) A` for an `f` that is constant where the label is, and different elsewhere. Both sides are applied
to one random column, with powers of two as `f` (see `probing.py`). Labels are the number of the sample, of the entry,
of the position along an axis, or of a block. Where a matrix falls into blocks, one column for each entry of a block
serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.products import Differentiable, Residual
from bpk.jacobians.second_order.graph import residual_product
from bpk.jacobians.second_order.probing import EXPONENTS, SEED, draw, marks, same, tolerance

Product = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Multiplies columns `[V, N, *x]` of every part with a symmetric matrix."""

AT_ONCE = 1 << 22
"""How many numbers products with unit vectors hold at a time, about."""

TURNS, DRAWS = 4, 4
"""Jacobians of samples are compared by so many columns: entries in so many orders of size, each drawn so many times."""


class Couplings:
    """Which entries of its parts a symmetric matrix couples.

    Args:
        product: Multiplies with it.
        shapes: `[N, *x]` of every part.
        like: A tensor of the right precision and device.
        most: Up to which relative difference entries count as the same (default: `tolerance`).
        within: The format that limits factors, if it is not that of `like`.
    """

    def __init__(
        self,
        product: Product,
        shapes: Sequence[torch.Size],
        like: Tensor,
        most: float | None = None,
        within: torch.dtype | None = None,
    ) -> None:
        self.product, self.shapes, self.like = product, tuple(shapes), like
        self.most = tolerance(like) if most is None else most
        self.within = within
        self.columns = [draw((1, *shape), like, k) for k, shape in enumerate(shapes)]

    @cached_property
    def products(self) -> Sequence[Tensor]:
        """The matrix times one random column."""
        return self.product(self.columns)

    @property
    def is_zero(self) -> bool:
        """Whether the matrix is zero."""
        return not any(bool(part.any()) for part in self.products)

    def none_between(self, labels: Sequence[Tensor], count: int) -> bool:
        """Whether entries with different labels are not coupled; false in formats too short to tell.

        Labels are whole numbers less than `count`, a tensor for every part, broadcast to its `[N, *x]`.
        """
        factors = [marks(label, count, self.like.dtype, self.within) for label in labels]
        for some in zip(*factors, strict=True) if self.most >= 0 else ():
            found = self.product([f * x for f, x in zip(some, self.columns, strict=True)])  # all are rounded alike
            if not all(same(x, f * y, self.most) for x, f, y in zip(found, some, self.products, strict=True)):
                return False
        return self.most >= 0

    def blocks(self) -> Blocks:
        """The axes (batch axis 0) along which nothing is coupled: of parts with as many, where all are as long."""
        alike = len({len(shape) for shape in self.shapes}) == 1
        axes = []
        for axis, sizes in enumerate(zip(*self.shapes, strict=True) if alike else ()):
            if not axis or len(set(sizes)) > 1:
                continue
            label = torch.arange(sizes[0], device=self.like.device)
            label = label.reshape(-1, *[1] * (len(self.shapes[0]) - axis - 1))
            if self.none_between([label] * len(self.shapes), sizes[0]):
                axes.append(axis)
        return Blocks(self.shapes, tuple(axes))


@dataclass(frozen=True)
class Blocks:
    """A matrix that is block-diagonal along some `axes` of its parts `[N, *x]`: a block for each position."""

    shapes: tuple[torch.Size, ...]
    axes: tuple[int, ...]

    @property
    def positions(self) -> int:
        """How many blocks a sample has."""
        return prod(self.shapes[0][axis] for axis in self.axes)

    @property
    def sizes(self) -> list[int]:
        """The rows of a block, by part."""
        inside = (0, *self.axes)
        return [prod(size for axis, size in enumerate(shape) if axis not in inside) for shape in self.shapes]

    @property
    def indices(self) -> Tensor:
        """Which entries `[P, S]` of the flattened, concatenated parts of a sample belong to each block."""
        sizes = [shape[1:].numel() for shape in self.shapes]
        parts = torch.arange(sum(sizes)).split(sizes)
        shaped = [part.reshape(1, 1, *shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]
        return torch.cat([self.to_blocks(k, part)[0, 0] for k, part in enumerate(shaped)], 1)

    def to_blocks(self, k: int, mat: Tensor) -> Tensor:
        """Columns `[K, N, *x]` of part `k` as `[K, N, P, B_k]`."""
        moved = mat.movedim([1 + axis for axis in self.axes], self._front)
        return moved.reshape(*mat.shape[:2], self.positions, self.sizes[k])

    def from_blocks(self, k: int, mat: Tensor) -> Tensor:
        """The way back."""
        shape = self.shapes[k]
        rest = [size for axis, size in enumerate(shape) if axis not in self.axes][1:]
        moved = mat.reshape(*mat.shape[:2], *(shape[axis] for axis in self.axes), *rest)
        return moved.movedim(self._front, [1 + axis for axis in self.axes])

    @property
    def _front(self) -> list[int]:
        return list(range(2, 2 + len(self.axes)))

    def at_positions(self, vectors: Tensor, here: Tensor) -> list[Tensor]:
        """Some columns `[B, N, P, B]` of blocks, each at one position and zero at all others: `[K, N, *x]` by part.

        `here` `[K]` are numbers of pairs of a column and its position, position running faster.
        """
        column, position = here // self.positions, here % self.positions
        spread = vectors[column]
        if self.positions > 1:
            mask = torch.zeros(len(here), self.positions, dtype=vectors.dtype, device=vectors.device)
            spread = spread * mask.scatter_(1, position[:, None], 1.0)[:, None, :, None]
        return [self.from_blocks(k, part) for k, part in enumerate(spread.split(self.sizes, 3))]


def connected(dense: Tensor) -> Tensor:
    """Indices `[B, S]` of the blocks outside of which a matrix `[D, D]` is zero (`[1, D]`: where sizes differ)."""
    found = components((dense != 0) | (dense != 0).T)
    return found[0] if len(found) == 1 else torch.arange(len(dense), device=dense.device)[None]


def components(joined: Tensor) -> list[Tensor]:
    """Indices `[B, S]` of what a symmetric relation `[D, D]` joins, directly or not: those of each size together."""
    size = len(joined)
    label = torch.arange(size, device=joined.device)
    joined = joined | (label == label[:, None])
    while True:  # everyone takes the smallest label around, until all in a block have the same
        least = torch.where(joined, label, size).amin(1)
        least = least[least]
        if torch.equal(least, label):
            break
        label = least
    members = label.bincount(minlength=size)[label]  # of the block of each
    order = label.argsort(stable=True)
    return [order[members[order] == most].reshape(-1, int(most)) for most in members.unique()]


def dense_blocks(product: Product, blocks: Tensor, like: Tensor, width: int) -> Tensor:
    """What lies in the blocks: `[N, B, S, S]`. A column for each of the `S` entries serves all blocks at once.

    Args:
        product: Multiplies columns `[V, N, D]`, the only part, with the matrices.
        blocks: Indices `[B, S]` of the entries of each block; together they are all `D` entries.
        like: A tensor `[N, ...]` of the right precision and device.
        width: How many numbers a product holds for each column and sample.
    """
    n, columns = len(like), []
    for part in blocks.split(max(1, AT_ONCE // max(1, n * width)), 1):  # [B, V]
        units = like.new_zeros(part.shape[1], blocks.numel()).scatter_(1, part.T, 1.0)
        (found,) = product([units[:, None].expand(-1, n, -1)])
        columns.append(found[:, :, blocks].permute(1, 2, 3, 0))
    return torch.cat(columns, 3)


# ---- of layers ------------------------------------------------------------------------------------------
def residual(rule: Differentiable, call: Call, wrts: Sequence[Wrt]) -> Residual:
    """The structure of the second derivative: zero, diagonal in the input, or general."""
    out = call.output
    if not out.numel():
        return Residual.ZERO
    multiply = residual_product(rule, call, draw(out.shape, out, len(wrts)), wrts)
    shapes = [call.shape_of(w) for w in wrts]
    found = Couplings(lambda mats: [*multiply(dict(zip(wrts, mats, strict=True))).values()], shapes, out)
    if found.is_zero:
        return Residual.ZERO
    size = call.sample_shape(0).numel()
    entry = torch.arange(size, device=out.device).reshape(call.sample_shape(0))
    is_diagonal = tuple(wrts) == (0,) and found.none_between([entry], size)
    return Residual.DIAGONAL if is_diagonal else Residual.GENERAL


def same_for_all(rule: Differentiable, call: Call, wrt: Wrt) -> bool:
    """Whether all samples have the same Jacobian.

    Entries of the output take turns in being the largest, so that none hides behind others; in double precision, if
    the layer allows that.
    """
    if call.batch_size < 2 or not call.output.numel() or tolerance(call.output) < 0:
        return False
    try:
        rows = rows_of_mixed(rule, call.cast(torch.float64), wrt)
    except RuntimeError:  # the layer holds tensors of its own in another precision
        rows = rows_of_mixed(rule, call, wrt)
    size = rows.abs().amax((1, 2), keepdim=True)
    return bool(((rows - rows[:, :, :1]).abs() <= tolerance(rows) * size).all())


def rows_of_mixed(rule: Differentiable, call: Call, wrt: Wrt) -> Tensor:
    """The same random columns times the Jacobian of each sample: `[TURNS, DRAWS, N, D]`."""
    out, most = call.output, EXPONENTS.get(call.output.dtype, 16)
    generator = torch.Generator().manual_seed(SEED)
    exponents = torch.randint(-most, most + 1, (TURNS, 1, 1, *out.shape[1:]), generator=generator, device="cpu")
    column = torch.ldexp(draw((TURNS, DRAWS, 1, *out.shape[1:]), out, 0), exponents.to(out.device)).flatten(0, 1)
    rows = rule.jac_t_mat_prod(call, column.expand(-1, *out.shape), wrt, sum_batch=False)
    return rows.reshape(TURNS, DRAWS, call.batch_size, -1)


def slopes(rule: Differentiable, call: Call) -> Tensor | None:
    """The diagonals `[N, D]` of the Jacobians with respect to the input, or `None` if they are not diagonal."""
    out = call.output
    if out.shape != call.inputs[0].shape or not out.numel():
        return None
    column, size = draw((1, *out.shape), out, 0), out[0].numel()
    factors = marks(torch.arange(size, device=out.device), size, out.dtype).reshape(-1, 1, *out.shape[1:])
    plain, *marked = rule.jac_t_mat_prod(call, torch.cat([column, column * factors]), 0)
    is_diagonal = same(torch.stack(marked), plain * factors, tolerance(out))
    return (plain / column[0]).reshape(len(out), -1) if is_diagonal else None
