"""Backward recurrences of a recurrent layer: evaluated once for all who ask, some columns at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.families.latest import Latest
from bpk.jacobians.recurrent.layer import ADD_AXIS, UNBATCHED, RecurrentForward
from bpk.jacobians.recurrent.stack import Pulled, Stack

KEEP = 1 << 22
"""How many numbers of backward recurrences are kept for the next one who asks."""

COLUMNS = 1 << 22
"""How many numbers a backward recurrence finds at a time (on a processor): memory of this size is used again."""


class RecurrentColumns(RecurrentForward):
    """What products for the input, the states and the parameters share."""

    def at(self, call: Call) -> Stack:
        """The layer at the point of a call, evaluated once."""
        if call.inputs[0].dim() != self.axes:
            raise UnsupportedLayer(explain(f"{self.name}: products are not defined here.", UNBATCHED + ".", ADD_AXIS))
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

    def pieces(self, call: Call, mat: Tensor) -> Iterator[tuple[Tensor | None, Pulled]]:
        """Backward recurrences of some columns at a time, and which these are (`None`: all of them).

        A column that starts at some step lives at earlier steps only: those that start together go back together.
        """
        stack = self.at(call)
        step = max(1, COLUMNS // stack.size) if mat.device.type == "cpu" else len(mat)
        if len(mat) <= step or torch.is_grad_enabled() or is_transformed():
            yield None, self.pulled(call, mat)
            return
        order, ends = torch.arange(len(mat), device=mat.device), None
        if stack.forward_only and set(call.used) == {0}:
            y = self.seeds(self.split(call, mat)).y
            if y is not None:
                alive = (y != 0).flatten(2).any(2)
                ends = (alive * torch.arange(1, len(y) + 1, device=mat.device)[:, None]).amax(0).clamp(min=1)
                order = ends.argsort()
        for part in order.split(step):
            seeds = self.seeds(self.split(call, wide(mat[part])))
            if ends is not None and seeds.y is not None:
                seeds.y = seeds.y[: int(ends[part].max())]
            yield part, stack.pull(seeds)

    def collect(self, call: Call, mat: Tensor, shape: Sequence[int], found: Callable[[Pulled], Tensor]) -> Tensor:
        """Columns `[V, *shape]` of what is `found` for some of them; steps at which they do not live are zero."""
        out: Tensor | None = None
        for part, pulled in self.pieces(call, mat):
            some = found(pulled)
            if part is None:
                return some.to(mat.dtype)
            if out is None:
                whole = some.shape[1:] == torch.Size(shape)
                out = call.empty((len(mat), *shape), mat) if whole else mat.new_zeros(len(mat), *shape)
            if some.shape[1:] == out.shape[1:]:
                out[part] = some.to(mat.dtype)
            else:
                out[part, :, : some.shape[2]] = some.to(mat.dtype)
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
