"""Is what is differentiated a sum of extended losses? A plain penalty beside them has curvature that nobody sends back.

One column travels along with those of second order: the gradient of the extended losses. At every call it has to be
the gradient that autograd brings. It goes all the way when a graph is seen for the first time, and from then on to the
calls that feed the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bpk.columns import ColumnSweep
from bpk.graph import Source
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.jacobians.loss import Loss
from bpk.records import Record
from bpk.sweeps import Columns, Step

KNOWN: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()
"""By the module of the loss: graphs (by their modules) in which every gradient came from extended losses."""

PRECISE = (torch.float32, torch.float64)
MISMATCH = 1e-2
"""From which difference on, relative to the larger of two gradients, something else must have added to one."""


class Objective(ColumnSweep):
    """The gradient of the extended losses as one column, compared with that of autograd.

    `near` are the calls at which to compare (by `id`); `None` stands for all.
    """

    def __init__(self, near: set[int] | None) -> None:
        super().__init__()
        self.near = near
        self.largest = 0.0

    @property
    def key(self) -> Hashable:
        return ("objective",)

    def start(self, step: Step, loss: Loss) -> None:
        for index, source in step.sources.items():
            gradient = loss.jac_t_mat_prod(step.full, step.grad.reshape(1), index)
            self.send(source, "gradient", gradient, None)

    def send(self, source: Source, key: Hashable, mat: Tensor, signs: Tensor | None) -> None:
        for record, part in source.pull(mat):
            self.waiting.setdefault(id(record), Columns()).add(key, part, None)

    def looks_at(self, record: Record) -> bool:
        return self.near is None or id(record) in self.near

    def visit(self, step: Step) -> Columns:
        waiting: Columns = self.waiting.setdefault(id(step.record), Columns())
        if "gradient" not in waiting.blocks:  # nothing came
            waiting.add("gradient", torch.zeros_like(step.grad)[None])
        self.largest = max(self.largest, float(step.grad.norm()))
        require_same(waiting.blocks["gradient"][0], step.grad, step.record, self.largest)
        return super().visit(step) if self.near is None else Columns()


def require_same(sent: Tensor, seen: Tensor, record: Record, largest: float) -> None:
    """Refuse where autograd's gradient is not that of the extended losses, by more than rounding of the `largest`."""
    difference, size = float((sent - seen).norm()), max(float(sent.norm()), float(seen.norm()))
    rounding = torch.finfo(seen.dtype).eps ** 0.5 * largest
    if difference > max(MISMATCH * size, rounding):  # false for NaN
        raise UnsupportedLayer(
            explain(
                f"The gradient at '{record.path}' ({type(record.module).__name__}) is not that of the extended losses.",
                "something else is part of the objective (a penalty by plain functions), and its curvature would be "
                "missing; or a hook changed the gradient, or a layer's rule is wrong.",
                "write the whole objective as one module and extend it, or use first-order extensions; bpk.check_rule "
                "checks a rule of your own.",
            )
        )


def objective_of(root: Record, above: Sequence[Record], sources_of: Callable[[Record], dict[int, Source]]) -> Objective:
    """The check for a graph: all of it at first, from then on the calls that feed nothing but the loss."""
    if form_of(above) not in KNOWN.get(root.module, ()):
        return Objective(None)
    near = {id(record) for source in sources_of(root).values() for record, _ in source.targets}
    for consumer in above:
        near -= {id(record) for source in sources_of(consumer).values() for record, _ in source.targets}
    return Objective(near)


def is_precise(record: Record) -> bool:
    """Whether a call computes in a precision in which two ways to the same gradient agree."""
    tensors = (*record.inputs, *record.params.values(), record.output)
    return all(x.dtype in PRECISE for x in tensors if x.is_floating_point())


def remember(root: Record, above: Sequence[Record]) -> None:
    """All gradients of a backward pass came from extended losses."""
    KNOWN.setdefault(root.module, set()).add(form_of(above))


def form_of(records: Sequence[Record]) -> Hashable:
    """A graph by its modules."""
    return tuple(id(record.module) for record in records)
