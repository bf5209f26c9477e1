"""Backward recurrences of a recurrent layer: evaluated once for all who ask, some columns at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.families.latest import Latest
from bpk.jacobians.recurrent.layer import ADD_AXIS, UNBATCHED, RecurrentForward
from bpk.jacobians.recurrent.stack import Pulled, Stack

KEEP = 1 << 22
"""How many numbers of backward recurrences are kept for the next one who asks."""

COLUMNS = 1 << 22
"""How many numbers a backward recurrence finds at a time (on a processor): memory of this size is used again."""


FEW = 64
"""From how many columns of a sample on these are not joined with others, which live for longer."""


@dataclass
class Piece:
    """The backward recurrence of some columns (`None`: all of them) of some samples."""

    columns: Tensor | None
    samples: slice
    pulled: Pulled


class RecurrentColumns(RecurrentForward):
    """What products for the input, the states and the parameters share."""

    def at(self, call: Call) -> Stack:
        """The layer at the point of a call, evaluated once."""
        if call.inputs[0].dim() != self.axes:
            raise UnsupportedLayer(f"{self.name}: products are not defined here.", UNBATCHED + ".", ADD_AXIS)
        masks = self.masks(call)
        if not torch.is_grad_enabled():
            return self.replay(call, masks)
        key = (self, "with graph")
        return call.memo(key, lambda: self.stack(call.options, call.inputs, call.params, masks=masks))

    def pulled(self, call: Call, mat: Tensor) -> Pulled:
        """The backward recurrence for columns `[V, N, *out]`, shared by all who ask with the same columns."""
        stack = self.at(call)
        latest: Latest[Pulled] = call.memo((self, "latest"), Latest)
        return latest.find(
            mat, lambda: stack.pull(self.seeds(self.split(call, wide(mat)))), lambda pulled: pulled.size, KEEP
        )

    def pieces(self, call: Call, mat: Tensor, apart: bool = False, to_input: bool = False) -> Iterator[Piece]:
        """Backward recurrences of some columns at a time.

        A column that starts at some step lives at earlier steps only: those that start together go back together. For
        those who sum over columns, these lie next to each other in memory, and few samples at a time go `apart` (on a
        processor).
        """
        stack, on_processor = self.at(call), mat.device.type == "cpu"
        apart = apart and on_processor
        # so many samples go back together that enough columns of each do
        group = max(1, COLUMNS // (stack.size * min(len(mat), 2 * FEW))) if apart else call.batch_size
        step = max(1, COLUMNS // (stack.size * group)) if on_processor else len(mat)
        if torch.is_grad_enabled() or is_transformed() or (len(mat) <= step and not apart):
            yield Piece(None, slice(None), self.pulled(call, mat))
            return
        ends = self.ends(call, mat)
        order = torch.arange(len(mat), device=mat.device) if ends is None else ends.argsort(stable=True)
        sorted_ends = None if ends is None else ends[order].tolist()
        samples = [slice(n, n + group) for n in range(0, call.batch_size, group)] if apart else [slice(None)]
        stacks = [stack.of_samples(rows) for rows in samples] if apart else [stack]
        for here in together(sorted_ends or [0] * len(mat), step, FEW if apart else step):
            part = order[here]
            some = mat[part]
            for rows, at in zip(samples, stacks, strict=True):
                seeds = self.seeds(self.split(call, wide(some[:, rows])))
                if sorted_ends is not None and seeds.y is not None:
                    seeds.y = seeds.y[: sorted_ends[here.stop - 1]]
                if apart:
                    seeds = seeds.columns_last()
                yield Piece(part, rows, at.pull(seeds, to_input))

    def ends(self, call: Call, mat: Tensor) -> Tensor | None:
        """How many steps each column lives for `[V]` (`None`: nobody knows)."""
        if not self.at(call).forward_only or set(call.used) != {0}:
            return None
        y = self.seeds(self.split(call, mat)).y
        if y is None:
            return None
        alive = (y != 0).flatten(2).any(2)
        return (alive * torch.arange(1, len(y) + 1, device=mat.device)[:, None]).amax(0).clamp(min=1)

    def collect(
        self, call: Call, mat: Tensor, shape: Sequence[int], found: Callable[[Piece], Tensor], apart: bool = False
    ) -> Tensor:
        """Columns `[V, *shape]` of what is `found` for some of them; steps at which they do not live are zero."""
        out: Tensor | None = None
        for piece in self.pieces(call, mat, apart, to_input=apart):
            some = found(piece).to(mat.dtype)
            if piece.columns is None:
                return some
            if out is None:
                whole = some.shape[2:] == torch.Size(shape[1:])
                out = call.empty((len(mat), *shape), mat) if whole else mat.new_zeros(len(mat), *shape)
            if some.dim() < 3:
                out[piece.columns] = some
            else:
                out[piece.columns, piece.samples, : some.shape[2]] = some
        assert out is not None
        return out

    def affine(self, call: Call, pulled: Pulled, param: str) -> tuple[Tensor, Tensor | None]:
        """The affine map of a parameter: gradients `[V, N, T, O]` of its output, and a weight's input `[N, T, I]`."""
        stack = self.at(call)
        layer, place, role = stack.find(param)
        trace, adjoint = stack.traces[layer][place], pulled.adjoints[layer][place]
        columns, values = adjoint.of(trace, role), trace.value(role)
        inputs = None if values is None else values[: len(columns)].transpose(0, 1)
        return columns.movedim(0, 2), inputs


def together(ends: Sequence[int], most: int, few: int) -> Iterator[slice]:
    """Which columns, in the order of their ends, go back together: at most so many, of one end unless they are few."""
    start = 0
    for k in range(1, len(ends) + 1):
        full = k - start == most or k == len(ends)
        if full or (k - start >= few and ends[k] != ends[k - 1]):
            yield slice(start, k)
            start = k
