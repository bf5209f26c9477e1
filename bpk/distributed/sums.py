"""Sums of tensors over processes: in buckets, several under way at a time; of symmetric matrices, one triangle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 1 << 25
"""How many bytes travel at once, at least where there are so many."""

UNDER_WAY = 4
"""How many buckets wait for their sums while others are filled."""


@dataclass
class Addend:
    """A tensor that is to be replaced by its sum over processes: on all, or on its `owner` only."""

    tensor: Tensor
    symmetric: bool = False
    owner: int | None = None

    def packed(self) -> Tensor:
        """What has to travel, flat."""
        return folded(self.tensor) if self.symmetric else self.tensor.reshape(-1)

    def unpack(self, flat: Tensor) -> None:
        """Take the sum."""
        self.tensor.copy_(unfolded(flat, len(self.tensor)) if self.symmetric else flat.view(self.tensor.shape))


def folded(matrix: Tensor) -> Tensor:
    """The `n (n + 1) / 2` entries of a symmetric matrix `[n, n]`: what is below the diagonal of one block lies beside
    the upper triangle of another one, so that a rectangle holds both.

    Source: Gustavson, Wasniewski, Dongarra, Langou (2010), Rectangular full packed format.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    >>> folded(x), bool((unfolded(folded(x), 3) == x).all())
    (tensor([4., 5., 1., 6., 2., 3.]), True)
    """
    a = len(matrix) // 2
    rectangle = matrix.new_zeros(a + 1, len(matrix) - a)
    rectangle[: len(matrix) - a] = matrix[a:, a:].triu()
    rectangle[1:, :a] += matrix[:a, :a].tril()
    return torch.cat([rectangle.flatten(), matrix[:a, a:].flatten()])


def unfolded(flat: Tensor, n: int) -> Tensor:
    """The matrix `[n, n]` again."""
    a, b = n // 2, n - n // 2
    rectangle, corner = flat[: (a + 1) * b].view(a + 1, b), flat[(a + 1) * b :].view(a, b)
    upper, lower = rectangle[:b].triu(), rectangle[1:, :a].tril()
    first, last = lower + lower.tril(-1).T, upper + upper.triu(1).T
    return torch.cat([torch.cat([first, corner], 1), torch.cat([corner.T, last], 1)])


def add_up(addends: Iterable[Addend], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their sums over processes, which must all come with the same ones in the same order."""
    waiting: deque[tuple[list[Addend], Tensor, dist.Work]] = deque()
    for bucket in buckets(addends):
        flat = torch.cat([addend.packed() for addend in bucket])
        owner = bucket[0].owner
        work = (
            dist.all_reduce(flat, group=group, async_op=True)
            if owner is None
            else dist.reduce(flat, group=group, group_dst=owner, async_op=True)
        )
        assert work is not None
        waiting.append((bucket, flat, work))
        if len(waiting) > UNDER_WAY:
            take(*waiting.popleft())
    for arrived in waiting:
        take(*arrived)


def take(bucket: list[Addend], flat: Tensor, work: dist.Work) -> None:
    """Wait for the sums of a bucket."""
    work.wait()
    sizes = [(a.tensor.numel() + len(a.tensor)) // 2 if a.symmetric else a.tensor.numel() for a in bucket]
    for addend, part in zip(bucket, flat.split(sizes), strict=True):
        addend.unpack(part)


def buckets(addends: Iterable[Addend]) -> Iterator[list[Addend]]:
    """Those of one type and one owner together, until there are enough bytes."""
    kinds: dict[object, list[Addend]] = {}
    for addend in addends:
        x = addend.tensor
        kinds.setdefault((addend.owner, x.dtype, x.device), []).append(addend)
    for together in kinds.values():
        bucket, size = list[Addend](), 0
        for addend in together:
            bucket.append(addend)
            size += addend.tensor.numel() * addend.tensor.element_size() // (2 if addend.symmetric else 1)
            if size >= BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
