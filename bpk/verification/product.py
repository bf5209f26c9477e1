"""A product with a weight, whichever function computes it: what entries of the weight multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Oriented = Callable[[Tensor], Tensor]
"""Looks at a weight as `[groups, out / groups, in, K]`: `in * K` entries make a row."""


def kept(x: Tensor) -> Tensor:
    """A copy that later in-place operations do not change."""
    return x.detach().clone()


@dataclass(frozen=True)
class Product:
    """A call of a function that multiplies with a weight, `[out, in]` or `transposed`.

    `again` gives its result for another weight, without bias. `order` are the axes of the result with the last `outs`
    for the output's channels. Factors are listed as `[A, G]` where it is `input_first`; `G` belongs to the second of
    several axes where channels are `swapped`, and `counts` `[..., 1]` is zero at rows that autograd ignores.
    """

    weight: Tensor
    again: Callable[[Tensor], Tensor]
    order: Sequence[int]
    oriented: Oriented
    transposed: bool = False
    input_first: bool = False
    outs: int = 1
    counts: Tensor | float = 1.0
    swapped: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Those of `G` and `A`."""
        groups, outputs, inputs, positions = self.oriented(torch.empty(self.weight.shape, device="meta")).shape
        return groups * outputs, inputs * positions

    def channels_behind(self, result: Tensor) -> Tensor:
        """`[N, ..., G]`: samples and positions, and the output's channels."""
        return result.permute(*self.order).flatten(result.dim() - self.outs)

    def restored(self, moved: Tensor, like: Tensor) -> Tensor:
        """The result of which these are the channels."""
        shape = [like.shape[k] for k in self.order]
        return moved.reshape(shape).permute(sorted(range(len(shape)), key=self.order.__getitem__))

    def rows(self, entries: Tensor) -> list[Tensor]:
        """`[E, N, R]`: what entries of a row of the weight multiply, in all samples and positions.

        That is a channel of the result if all of the weight but that entry is zero; groups are averaged.
        """
        found = []
        for k in entries.tolist():
            unit = self.weight.new_zeros(self.weight.shape)
            part = self.oriented(unit)
            groups, outputs, _, positions = part.shape
            part[:, 0, k // positions, k % positions] = 1.0
            with torch.no_grad():
                out = self.channels_behind(self.again(unit)) * self.counts
            found.append((out[..., ::outputs] / groups**0.5).flatten(1))
        return [torch.stack(found)]


def as_matrix(inputs: int, transposed: bool) -> Oriented:
    """A weight `[out, in]` or, transposed, `[in, out]`, with several axes for either."""
    return lambda w: (w.view(inputs, -1).T if transposed else w.view(-1, inputs))[None, ..., None]
