"""Symmetric matrices that are block-diagonal: the indices `[B, S]` of their blocks, and what lies in the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""Multiplies columns `[V, N, D]` with a matrix for each sample."""

AT_ONCE = 1 << 22
"""How many numbers products with unit vectors hold at a time, about."""


def connected(dense: Tensor) -> Tensor:
    """Indices `[B, S]` of the blocks outside of which a matrix `[D, D]` is zero (`[1, D]`: where sizes differ)."""
    size = len(dense)
    every = torch.arange(size, device=dense.device)
    joined = (dense != 0) | (dense != 0).T | torch.eye(size, dtype=torch.bool, device=dense.device)
    label = every
    while True:  # everyone takes the smallest label around, until all in a block have the same
        least = torch.where(joined, label, size).amin(1)
        least = least[least]
        if torch.equal(least, label):
            break
        label = least
    counts = label.unique(return_counts=True)[1]
    same = len(counts) > 0 and bool((counts == counts[0]).all())
    return label.argsort(stable=True).reshape(len(counts), -1) if same else every[None]


def along_axes(shape: Sequence[int], coupled: Sequence[bool], copies: int) -> Tensor:
    """Indices `[B, S]` of the blocks where entries `[copies, *shape]` are coupled along some axes, and over copies."""
    size = torch.Size(shape).numel()
    entries = torch.arange(size).reshape(tuple(shape))
    inner = [axis for axis, together in enumerate(coupled) if together]
    outer = [axis for axis, together in enumerate(coupled) if not together]
    count = torch.Size(shape[axis] for axis in outer).numel()
    own = entries.permute((*outer, *inner)).reshape(count, torch.Size(shape[axis] for axis in inner).numel())
    return torch.cat([own + size * k for k in range(copies)], 1)


def dense_blocks(product: Product, blocks: Tensor, like: Tensor, width: int) -> Tensor:
    """What lies in the blocks: `[N, B, S, S]`. A column for each of the `S` entries serves all blocks at once.

    Args:
        product: Multiplies with the matrices.
        blocks: Indices `[B, S]` of the entries of each block; together they are all `D` entries.
        like: A tensor `[N, ...]` of the right precision and device.
        width: How many numbers a product holds for each column and sample.
    """
    n, columns = len(like), []
    for part in blocks.split(max(1, AT_ONCE // max(1, n * width)), 1):  # [B, V]
        units = like.new_zeros(part.shape[1], blocks.numel()).scatter_(1, part.T, 1.0)
        found = product(units[:, None].expand(-1, n, -1))
        columns.append(found[:, :, blocks].permute(1, 2, 3, 0))
    return torch.cat(columns, 3)
