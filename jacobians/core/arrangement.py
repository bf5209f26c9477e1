"""How the entries of one tensor are arranged in another: permutations of axes and changes of shape, each in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

AXES, SHAPE = "permute", "reshape"

Step = tuple[str, tuple[int, ...]]
"""What is done, and the axes or sizes with which."""


@dataclass(frozen=True)
class Arrangement:
    """A function of tensors `[..., *shape]` that moves each entry to a place of its own.

    >>> by_head = Arrangement((2, 3, 4), ((AXES, (1, 0, 2)), (SHAPE, (3, 8))))
    >>> by_head(torch.ones(5, 2, 3, 4)).shape, by_head.inverse(torch.ones(5, 3, 8)).shape
    (torch.Size([5, 3, 8]), torch.Size([5, 2, 3, 4]))
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    def __call__(self, x: Tensor) -> Tensor:
        lead = x.dim() - len(self.shape)
        for kind, numbers in self.steps:
            if kind == AXES:
                x = x.permute(*range(lead), *(lead + axis for axis in numbers))
            else:
                x = x.reshape(*x.shape[:lead], *numbers)
        return x

    @cached_property
    def inverse(self) -> Arrangement:
        """The way back."""
        shape, back = self.shape, list[Step]()
        for kind, numbers in self.steps:
            if kind == AXES:
                back.append((AXES, tuple(sorted(range(len(numbers)), key=numbers.__getitem__))))
                shape = tuple(shape[axis] for axis in numbers)
            else:
                back.append((SHAPE, shape))
                shape = numbers
        return Arrangement(shape, tuple(reversed(back)))

    @cached_property
    def rows(self) -> Tensor:
        """Of a matrix `[I, O]`: its rows in the order of the tensor's entries."""
        return self._numbers()[:, 0].argsort()

    @cached_property
    def columns(self) -> Tensor:
        """The same of its columns."""
        return self._numbers()[0].argsort()

    @cached_property
    def in_order(self) -> bool:
        """Whether both are so already."""
        if self.is_transpose is not None:
            return True
        return all(torch.equal(order, torch.arange(len(order), device="cpu")) for order in (self.rows, self.columns))

    @cached_property
    def firsts(self) -> tuple[bool, bool]:
        """Whether the tensor is, entry by entry, that matrix once rows and columns are in order, or its transpose."""
        if self.is_transpose is not None:
            return not self.is_transpose or 1 in self.shape, self.is_transpose or 1 in self.shape
        matrix = self._numbers()[self.rows][:, self.columns]
        number = torch.arange(matrix.numel(), device="cpu")
        return torch.equal(matrix.flatten(), number), torch.equal(matrix.T.flatten(), number)

    @cached_property
    def is_transpose(self) -> bool | None:
        """Of a matrix that is handed on, whether its axes are exchanged (`None`: something else is done).

        >>> Arrangement((2, 3), ((AXES, (1, 0)),)).is_transpose, Arrangement((2, 3), ((SHAPE, (3, 2)),)).is_transpose
        (True, None)
        """
        if len(self.shape) != 2 or any(kind != AXES for kind, _ in self.steps):
            return None
        return sum(axes == (1, 0) for _, axes in self.steps) % 2 == 1

    def _numbers(self) -> Tensor:
        """The numbers of the tensor's entries where they go to: as large as the tensor, so not kept."""
        return self(torch.arange(torch.Size(self.shape).numel(), device="cpu").reshape(self.shape))
