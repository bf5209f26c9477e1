"""Unfolding: the patches that a convolution, plain or transposed, multiplies its weight with."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


def unfold(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Patches `[N, C * prod(kernel), T]` of `x` `[N, C, *s]`, for one, two or three axes `s`."""
    if len(kernel) == 2:
        return F.unfold(x, kernel, dilation, padding, stride)
    if len(kernel) == 1:
        return F.unfold(x[:, :, None], (1, *kernel), (1, *dilation), (0, *padding), (1, *stride))
    x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
    d = len(kernel)
    for axis, (k, s, gap) in enumerate(zip(kernel, stride, dilation), start=2):
        x = x.unfold(axis, gap * (k - 1) + 1, s)[..., ::gap]
    order = (0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d))  # [N, C, *t, *k] -> [N, C, *k, *t]
    return x.permute(order).reshape(x.shape[0], x.shape[1] * prod(kernel), -1)


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
        spread = x.new_zeros(n, c, *((length - 1) * s + 1 for length, s in zip(x.shape[2:], stride)))
        spread[(..., *(slice(None, None, s) for s in stride))] = x
    margins: list[int] = []
    for k, p, gap, length, wanted in zip(kernel, padding, dilation, spread.shape[2:], size):
        before = gap * (k - 1) - p
        margins = [before, wanted + gap * (k - 1) - before - length, *margins]
    ones, none = (1,) * len(kernel), (0,) * len(kernel)
    patches = unfold(F.pad(spread, margins), kernel, ones, none, dilation)
    mirrored = patches.reshape(n, c, *kernel, -1).flip(tuple(range(2, 2 + len(kernel))))
    return mirrored.reshape(patches.shape)


def pad_adjoint(g: Tensor, margins: Sequence[int], mode: str, shape: Sequence[int]) -> Tensor:
    """Multiply `[B, C, *padded]` with the transpose of `F.pad(., margins, mode)`: `[B, C, *shape]`."""
    if mode == "constant":
        index = [slice(None)] * g.dim()
        for axis, before in enumerate(margins[::2], start=1):
            index[-axis] = slice(before, before + shape[-axis])
        return g[tuple(index)]
    point = torch.zeros(*g.shape[:2], *shape, dtype=g.dtype, device=g.device)
    _, pull = torch.func.vjp(lambda x: F.pad(x, list(margins), mode), point)
    return pull(g)[0]
