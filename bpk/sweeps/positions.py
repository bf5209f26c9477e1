"""A square root of the GGN whose columns keep to one position of a sample (a time step, a pixel), while that lasts.

A loss over `T` positions has `C T` columns, each zero at all positions but one. Layers that treat positions one by one
leave it at that. So `[V, N, T, ...]` stands for the columns of all positions, where written out they would be
`[V T, N, T, ...]`, and for squares a position counts as a sample of its own. Columns are written out where positions
meet (attention, recurrence, pooling), a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from bpk.fields.parameters import is_trained
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import REARRANGING, Source
from bpk.plan.samples import slots
from bpk.recording.record import Record
from bpk.sweeps.square_root import SquareRoot
from bpk.sweeps.sweeps import Columns, Step, matched, positive_scale


class ByPosition(SquareRoot):
    """An exact square root for extensions whose values are sums over columns and rows.

    `is_shared` says whether something besides a call uses a parameter.
    """

    def __init__(self, samples: tuple[int, ...] | None, is_shared: Callable[[Tensor, Record], bool]) -> None:
        super().__init__(None, samples)
        self.is_shared = is_shared

    def rounds(self, step: Step, loss: Loss, columns: int | None) -> Iterator[None]:
        joint = step.joint(loss)
        several = step.samples_of_rows is not None or any(x.dim() > 2 for x in joint.call.inputs)  # positions
        alone = several and len(step.sources) == 1 and self.samples is None and not torch.is_grad_enabled()
        root = joint.rule.sqrt_hessian_by_position(joint.call) if alone else None
        if root is None:
            yield from super().rounds(step, loss, columns)
            return
        mat, axes = root
        scale, source, limit = positive_scale(step).sqrt(), next(iter(step.sources.values())), columns or len(mat)
        where = positions_of(mat.shape[1:], axes, mat.device)
        for j, part in enumerate(mat.split(max(1, limit))):
            if j:
                yield
            yield from self.pass_on(step, source, ("loss", id(step.record), j), part * scale, where)

    def carry(self, step: Step) -> Columns:
        return self.visit(step)

    def visit(self, step: Step) -> Columns:
        waiting: Columns = self.waiting.get(id(step.record), Columns())
        columns = super().visit(step) if waiting.blocks or not waiting.apart else self.waiting.pop(id(step.record))
        columns.apart = {key: (axes, matched(mat, step.full)) for key, (axes, mat) in waiting.apart.items()}
        for key, (axes, mat) in columns.apart.items():
            for index, source in step.sources.items():
                sent = step.rule.jac_t_mat_prod(step.call, mat, index)
                where = positions_of(sent.shape[1:], range(1, 1 + axes), mat.device)
                for _ in self.pass_on(step, source, key, sent, where):
                    if step.go_round is not None:
                        step.go_round()
        return columns

    def pass_on(self, step: Step, source: Source, key: Hashable, mat: Tensor, where: Tensor) -> Iterator[None]:
        """Send columns of all positions; if these do not stay apart, write them out, with a yield between groups."""
        axes = self.stays_apart(source, where)
        if axes is not None:
            ((record, part),) = source.pull(mat)
            self.waiting.setdefault(id(record), Columns()).apart[key] = axes, part
            return
        samples = self.attribution.rows(source.consumer)
        limit = step.at_most or 1 << 62
        for k, part in enumerate(written_out(mat, where, samples, limit)):
            if k:
                yield
            for j, piece in enumerate(step.pieces(part)):
                self.send(source, (key, k, j), piece, None)

    def stays_apart(self, source: Source, where: Tensor) -> int | None:
        """How many axes behind the batch axis tell positions apart at the call that feeds an input (`None`: mixed)."""
        if len(source.targets) != 1 or source.trained or not source.functions <= REARRANGING:
            return None
        ((record, _),) = source.targets
        if record.rule is None or len(record.inputs) != 1 or len(record.used) != 1:
            return None
        shared = [p for p in record.params.values() if is_trained(p) and self.is_shared(p, record)]
        call = record.call()
        looks_at = record.rule.acts_on(call)
        if shared or looks_at is None or len(call.inputs) != 1:
            return None
        seen = source.pull(where.to(call.output.dtype)[None])[0][1][0]
        axes = leading_axes(seen)
        free = call.inputs[0].dim() - looks_at - 1
        same = axes is not None and call.inputs[0].shape[: 1 + axes] == call.output.shape[: 1 + axes]
        return axes if axes is not None and same and axes <= free else None


def positions_of(shape: Sequence[int], axes: Sequence[int], device: torch.device) -> Tensor:
    """Numbers `[N, *x]` from 1 on of sample and position, where these axes tell positions apart."""
    kept = [size if axis == 0 or axis in axes else 1 for axis, size in enumerate(shape)]
    return (torch.arange(torch.Size(kept).numel(), device=device).reshape(kept) + 1).expand(*shape)


def leading_axes(numbers: Tensor) -> int | None:
    """Behind how many axes numbers of positions are constant, if the axes before have one number for each entry."""
    for axes in range(numbers.dim()):
        front = numbers.flatten(0, axes).reshape(numbers.shape[: 1 + axes].numel(), -1)
        first = front[:, 0]
        if bool((front == first[:, None]).all()):
            return axes if bool((first > 0).all()) and len(first.unique()) == len(first) else None
    return None


def written_out(mat: Tensor, where: Tensor, samples: Tensor | None, limit: int) -> Iterator[Tensor]:
    """Columns `[V, N, *x]` of all positions as columns `[K, N, *x]` of one position each, at most `limit` at a time."""
    in_row = int(where.max()) // len(where)  # positions of a row
    number = (where - 1) % in_row
    if samples is not None:
        number = number + in_row * slots(samples).reshape(-1, *[1] * (where.dim() - 1))
    count = int(number.max()) + 1
    for chosen in torch.arange(len(mat) * count, device=mat.device).split(limit):
        here = (number[None] == (chosen % count).reshape(-1, *[1] * where.dim())).to(mat.dtype)
        yield mat[chosen // count] * here
