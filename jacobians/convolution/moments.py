"""The second moment of a convolution's patches, without forming most of its products twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from torch import Tensor

from bpk.jacobians.convolution.unfold import windows
from bpk.jacobians.core.gemm import gram
from bpk.jacobians.core.numeric import chunks, linear, wide

LARGEST = 1 << 22
"""How many numbers lines of patches hold at most; a larger sample is looked at in strips, which is also faster."""

TRIANGLE = 0.62
"""The time of a large symmetric product, as a part of that of one which is not (see `gemm.gram`)."""

ASSEMBLING = 130
"""How many positions a product of two patch entries may sum for the time that putting it into its place takes more."""

CALLS = 1 << 21
"""How many products, each multiplied with the positions it sums, take the time that one block takes beside these."""

Blocks = dict[tuple[int, int], Tensor]


def shares_enough(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], width: int, positions: int
) -> bool:
    """Whether products that `patch_moment` does not form twice are worth putting its blocks together. Measured."""
    blocks = kernel[0] ** 2
    symmetric, *others = [len(_shared(kernel[0] - gap, stride[0], dilation[0])) for gap in range(kernel[0])]
    formed = TRIANGLE * symmetric + sum(others)
    return width**2 * (positions * (TRIANGLE - formed / blocks) - ASSEMBLING) > CALLS * blocks


def patch_moment(
    padded: Callable[[slice], Tensor],
    n: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """`sum_n sum_t a a^T` `[I, I]` of the patches `a` of `x`, `I` over (channel, kernel).

    The block of kernel rows `(k, k')` sums products of image rows `(k + t, k' + t)` over output rows
    `t`. Blocks with the same `k' - k` share all of these but a few at the border (where `k` times the
    dilation has the same remainder by the stride), so that each product of two rows is formed once.
    `padded` gives some samples of the padded input.
    """
    first = padded(slice(0, 1))
    channels, rest, rows = first.shape[1], tuple(kernel[1:]), kernel[0]
    width = channels * prod(rest)
    blocks: Blocks = {}
    for part in chunks(n, width * first.shape[2] * prod(size[1:]) // 8, first.device):
        for strip in _strips(padded(part), kernel, stride, dilation, size, width):
            lines = _lines(wide(strip), rest, stride[1:], dilation[1:])
            for gap in range(rows):
                for members in _shared(rows - gap, stride[0], dilation[0]):
                    _add_shared(blocks, lines, members, gap, stride[0], dilation[0], size[0])
    moment = next(iter(blocks.values())).new_empty(channels, rows, prod(rest), channels, rows, prod(rest))
    while blocks:  # what has been copied is let go, so that little exists twice
        (k, j), block = blocks.popitem()
        moment[:, k, :, :, j] = block.view(channels, prod(rest), channels, prod(rest))
        if k != j:
            moment[:, j, :, :, k] = block.T.reshape(channels, prod(rest), channels, prod(rest))
    return moment.view(channels * prod(kernel), -1)


def _strips(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], size: Sequence[int], width: int
) -> Iterator[Tensor]:
    """Padded samples cut along their second axis, each strip with what its output positions see."""
    numbers = width * len(x) * x.shape[2] * prod(size[1:])
    if len(size) < 2 or numbers <= LARGEST:
        yield x
        return
    step = max(1, LARGEST // (numbers // size[1]))
    for start in range(0, size[1], step):
        last = min(start + step, size[1]) - 1
        yield x[:, :, :, start * stride[1] : last * stride[1] + dilation[1] * (kernel[1] - 1) + 1]


def _lines(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Patches along all axes but the first: `[C * prod(kernel), H, B * prod(positions)]`."""
    b, c, height = x.shape[:3]
    d = len(kernel)
    folded = x.transpose(1, 2).flatten(0, 1)  # [B H, C, *w]
    seen = windows(folded, kernel, stride, (0,) * d, dilation) if d else folded
    seen = seen.reshape(b, height, c * prod(kernel), -1)
    return seen.permute(2, 1, 0, 3).reshape(c * prod(kernel), height, -1)


def _shared(count: int, stride: int, dilation: int) -> list[list[int]]:
    """Kernel rows `k < count` grouped by the remainder of `k * dilation` by the stride."""
    groups: dict[int, list[int]] = {}
    for k in range(count):
        groups.setdefault(k * dilation % stride, []).append(k)
    return list(groups.values())


def _add_shared(
    blocks: Blocks, lines: Tensor, members: Sequence[int], gap: int, stride: int, dilation: int, size: int
) -> None:
    """Add to the blocks `(k, k + gap)` of all `k` in `members`, which see the same pairs of rows."""
    remainder = members[0] * dilation % stride
    starts = {k: k * dilation // stride for k in members}
    low, high = min(starts.values()), max(starts.values())

    def product(begin: int, end: int) -> Tensor:
        """Image rows `begin:end` (counted in strides) with those `gap` kernel rows further down."""
        at = slice(remainder + begin * stride, remainder + (end - 1) * stride + 1, stride)
        left = lines[:, at].flatten(1)
        if gap == 0:
            return gram(left)
        shift = gap * dilation
        return linear(left, lines[:, at.start + shift : at.stop + shift : stride].flatten(1))

    if high >= low + size:  # nothing in common
        for k, start in starts.items():
            _add(blocks, (k, k + gap), product(start, start + size))
        return
    core = product(high, low + size)
    for k in members:
        _add(blocks, (k, k + gap), core)
    for t in (*range(low, high), *range(low + size, high + size)):
        border = product(t, t + 1)
        for k, start in starts.items():
            if start <= t < start + size:
                blocks[k, k + gap] += border


def _add(blocks: Blocks, key: tuple[int, int], value: Tensor) -> None:
    """Add to a block, or begin it (with a copy: others share the value)."""
    if key in blocks:
        blocks[key] += value
    else:
        blocks[key] = value.clone()
