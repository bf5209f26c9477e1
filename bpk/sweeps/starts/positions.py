"""A square root of the GGN whose columns keep to one position of a sample (a time step, a pixel), while that lasts.

A loss over `T` positions has `C T` columns, each zero at all positions but one. Layers that treat positions one by one
leave it at that. So `[V, N, T, ...]` stands for the columns of all positions, where written out they would be
`[V T, N, T, ...]`, and for squares a position counts as a sample. Columns are written out where positions meet
(attention, recurrence, pooling), a few at a time.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from bpk.fields.arrived import Columns, Use
from bpk.jacobians.core.call import Wrt
from bpk.plan.samples.rows import along_rows, slots
from bpk.plan.step import Step
from bpk.sweeps.columns.lazy import Chunk, LazyColumns, StartingColumns
from bpk.sweeps.columns.position_axes import at_producer, axes_of_positions, positions_of
from bpk.sweeps.starts.square_root import SquareRoot
from bpk.sweeps.sweep import times_root_of_factor


class ByPosition(SquareRoot):
    """An exact square root for extensions whose values are sums over columns and rows.

    `waiting` has the columns of all positions at a call, by the place where they began, with the number of axes behind
    the batch axis that tell positions apart.
    """

    def prepare(self) -> None:
        super().prepare()
        self.waiting: dict[Step, dict[Hashable, tuple[int, Tensor]]] = {}

    def at_loss(self, step: Step) -> list[StartingColumns]:
        joint, rows = step.joint, step.samples_of_rows
        several = rows is not None or [x for x in joint.call.inputs if x.dim() > 2 and x.numel()]
        possible = several and len(step.links) == 1 and self.samples is None and not torch.is_grad_enabled()
        root = joint.rule.sqrt_hessian_by_position(joint.call) if possible else None
        if root is None:
            return super().at_loss(step)
        where = positions_of(root.shape[1:], joint.rule.positions(joint.call.inputs[0]), root.device)
        found: list[StartingColumns] = []
        mat = times_root_of_factor(root, step)
        for number, part in enumerate(mat.split(max(1, self.at_most or len(mat)))):
            index = next(iter(step.links))
            self.started, self.rounds = self.started + len(part), self.rounds + 1
            found += self.send_positions(step, index, ("loss", step.number, number), part, where)
        return found

    def on_the_way(self, step: Step) -> list[StartingColumns]:
        """Send columns of all positions through a call; returns those that have to be written out behind it."""
        found: list[StartingColumns] = []
        for key, (axes, arrived) in self.waiting.pop(step, {}).items():
            assert step.rule is not None
            step.reached = True
            mat = step.cast(arrived)
            self.collect(step, key, mat, axes)
            for index in step.links:
                sent = step.rule.jac_t_mat_prod(step.view(None), mat, index)
                where = positions_of(sent.shape[1:], range(1, 1 + axes), mat.device)
                found += self.send_positions(step, index, key, sent, where)
        return found

    def collect(self, step: Step, key: Hashable, mat: Tensor, axes: int) -> None:
        """A position counts as a sample of the call's parameters, which no other call uses."""
        columns, uses = Columns(), dict[int, list[Use]]()
        columns.add(key, mat.flatten(1, 1 + axes))
        for name, param in step.params.items():  # a parameter may have several names
            assert step.rule is not None
            uses.setdefault(id(param), []).append(Use(step.call.by_position(axes), step.rule, name, columns))
        for found in uses.values():
            self.settle(step.params[found[0].name], found, 0)

    def send_positions(
        self, step: Step, index: int, key: Hashable, mat: Tensor, where: Tensor
    ) -> list[StartingColumns]:
        """Hand columns of all positions to what feeds an input, or return them, if they have to be written out."""
        producer, mats, numbers = at_producer(step.links[index], mat, where)
        alone = producer is not None and not any(self.plan.is_shared(p) for p in producer.params.values())
        axes = axes_of_positions(producer, numbers) if producer is not None and alone else None
        if producer is None or axes is None:
            return [written_out(mat, where, step.samples_of_rows, index, ("positions", key))]
        self.waiting.setdefault(producer, {})[key] = axes, mats
        return []


def written_out(mat: Tensor, where: Tensor, samples: Tensor | None, index: int, name: Hashable) -> LazyColumns:
    """Columns `[V, N, *x]` of all positions at an input as columns `[K, N, *x]` of one position each."""
    in_row = int(where.max()) // len(where)  # positions of a row
    number = (where - 1) % in_row
    if samples is not None:
        number = number + in_row * along_rows(slots(samples), where)
    count = int(number.max()) + 1

    def make(start: int, stop: int) -> Chunk:
        columns = mat.new_empty(stop - start, *mat.shape[1:])
        for k in range(start // len(mat), (stop - 1) // len(mat) + 1):
            first, last = max(start, k * len(mat)), min(stop, (k + 1) * len(mat))
            some = mat[first - k * len(mat) : last - k * len(mat)]
            torch.mul(some, (number == k).to(mat.dtype), out=columns[first - start : last - start])
        of_inputs: dict[Wrt, Tensor] = {index: columns}
        return of_inputs, None

    return LazyColumns(len(mat) * count, make, name, unit=len(mat))
