"""Unfolding: the patches that a convolution, plain or transposed, multiplies its weight with."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The windows of `x` `[N, C, *s]` as a view of its padded copy: `[N, C, *kernel, *positions]`."""
    if any(padding):
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
    d = len(kernel)
    for axis, (k, s, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (k - 1) + 1, s)[..., ::gap]
    return x.permute(0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d))


def unfold(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Patches `[N, C * prod(kernel), T]` of `x` `[N, C, *s]`, for one, two or three axes `s`.

    A strided copy, which is several times faster than `F.unfold`.
    """
    seen = windows(x, kernel, stride, padding, dilation)
    return seen.reshape(x.shape[0], x.shape[1] * prod(kernel), prod(seen.shape[2 + len(kernel) :]))


def unfold_transposed(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """Patches of a transposed convolution with output positions `size`: `[N, C * prod(kernel), T]`.

    Position `t` sees `x[(t + padding - k * dilation) / stride]` through entry `k` of the kernel, where
    that is whole: a convolution of the input, spread out by `stride`, with the mirrored kernel.
    """
    n, c = x.shape[:2]
    spread = x
    if any(s > 1 for s in stride):
        spread = x.new_zeros(n, c, *((length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)))
        at = (slice(None), slice(None)) + tuple(slice(None, None, s) for s in stride)
        spread[at] = x
    margins: list[int] = []
    for k, p, gap, length, wanted in zip(kernel, padding, dilation, spread.shape[2:], size, strict=True):
        before = gap * (k - 1) - p
        margins = [before, wanted + gap * (k - 1) - before - length, *margins]
    ones, none = (1,) * len(kernel), (0,) * len(kernel)
    seen = windows(F.pad(spread, margins), kernel, ones, none, dilation)
    return seen.flip(tuple(range(2, 2 + len(kernel)))).reshape(n, c * prod(kernel), prod(size))


def pad_adjoint(g: Tensor, margins: Sequence[int], mode: str, shape: Sequence[int]) -> Tensor:
    """Multiply `[B, C, *padded]` with the transpose of `F.pad(., margins, mode)`: `[B, C, *shape]`."""
    if mode == "constant":
        index = [slice(None)] * g.dim()
        for axis, before in enumerate(margins[::2], start=1):
            index[-axis] = slice(before, before + shape[-axis])
        return g[tuple(index)]

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, list(margins), mode)

    point = torch.zeros(*g.shape[:2], *shape, dtype=g.dtype, device=g.device)
    pull = torch.func.vjp(pad, point)[1]
    return pull(g)[0]
