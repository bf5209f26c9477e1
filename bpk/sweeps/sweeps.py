"""What travels backwards along the graph of calls, beside the gradient.

A sweep starts at a loss, goes back through each call with the call's rule, and shows every call what
has arrived at its output. Extensions that ask for equal sweeps share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.plan.graph import Source
from bpk.plan.samples import Attribution, slots
from bpk.recording.record import Record

PIECE = 1 << 22
"""How many numbers a block of columns holds at most on a processor (16 MiB in float32): larger allocations go back to
the operating system when freed, and getting new pages costs more than the arithmetic."""


@dataclass
class Columns:
    """Columns at the output of a call: blocks `[V, N, *out]` by the place where they were born.

    `signs` of a block (`[V, N]`, or `None` for all ones) belong to its birthplace; blocks of one birthplace
    that arrive over several branches are added. `own` holds what a residual contributes to a parameter itself,
    `[V, N, *p]` by parameter name and birthplace. Blocks in `unshared` are in memory that nobody else looks at. Those
    in `apart` stand for columns that keep to one position each, along so many axes behind the batch axis
    (`positions.py`).
    """

    blocks: dict[Hashable, Tensor] = field(default_factory=dict)
    own: dict[str, dict[Hashable, Tensor]] = field(default_factory=dict)
    signs: dict[Hashable, Tensor | None] = field(default_factory=dict)
    unshared: set[Hashable] = field(default_factory=set)
    apart: dict[Hashable, tuple[int, Tensor]] = field(default_factory=dict)

    def add(self, key: Hashable, mat: Tensor, signs: Tensor | None = None) -> None:
        """Add a block, or its share from another branch."""
        self.blocks[key] = self.blocks[key] + mat if key in self.blocks else mat
        self.signs[key] = signs

    def add_own(self, name: str, key: Hashable, rows: Tensor, signs: Tensor | None = None) -> None:
        """Add rows `[V, N, *p]` that belong to a parameter itself."""
        own = self.own.setdefault(name, {})
        own[key] = own[key] + rows if key in own else rows
        self.signs[key] = signs


DIRECT = "direct"
"""Under which name a parameter that plain functions use finds what has reached it."""


@dataclass
class Direct:
    """What has reached a parameter that plain functions use, and the full batch's `N`."""

    arrived: Any
    batch_size: int


@dataclass
class Step:
    """One visit of the backward pass: a call, its gradient, and what feeds it.

    `full` is the call on the whole batch, `call` the one restricted to a sweep's samples. `reused` names parameters
    that calls further up use as well; `largest` is the size of the largest output further up. Where rows are not the
    samples in order, `samples_of_rows` says which of the `batch_size` samples each belongs to. If columns may only be
    `at_most` so many at a time, `go_round` sends those on their way back to the end, to make room for others.
    """

    record: Record
    rule: Rule
    full: Call
    call: Call
    grad: Tensor
    sources: dict[int, Source]
    reused: tuple[str, ...] = ()
    largest: int = 1
    samples_of_rows: Tensor | None = None
    batch_size: int = 0
    at_most: int | None = None
    go_round: Callable[[], None] | None = None

    def joint(self, loss: Loss) -> Joint:
        """The loss as a function of the inputs that calls or parameters feed."""
        return loss.joint(self.full, tuple(self.sources))

    @property
    def piece(self) -> int:
        """Into how many columns to split, so that none outgrows what memory hands out quickly at the largest layer."""
        return max(1, PIECE // self.largest) if self.full.output.device.type == "cpu" else 1 << 62

    def pieces(self, mat: Tensor) -> tuple[Tensor, ...]:
        """Split columns into such pieces."""
        return mat.split(self.piece)


class Sweep(ABC):
    """Something that travels backwards; equal `key`s are computed once.

    `samples` restricts it to some samples of the batch. `waiting` holds what was sent to calls, by their `id`, and
    `direct` what has reached parameters that plain functions use.
    """

    second_order = True
    needs_root = False
    """Whether it starts from a square root of the loss Hessian, which must then be positive semi-definite."""

    def __init__(self, samples: tuple[int, ...] | None = None) -> None:
        self.samples = samples
        self.waiting: dict[int, Any] = {}
        self.direct: dict[Tensor, Direct] = {}
        self.attribution = Attribution()

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Sweeps with equal keys are the same."""

    @abstractmethod
    def start(self, step: Step, loss: Loss) -> None:
        """Begin at a loss; `step.grad` is the scalar gradient with which it enters the objective."""

    def rounds(self, step: Step, loss: Loss, columns: int | None) -> Iterator[None]:
        """Begin at a loss with at most so many columns at a time.

        Whenever this yields, what was sent has to go all the way back before there is more. Default: one round.
        """
        self.start(step, loss)
        return iter(())

    @abstractmethod
    def visit(self, step: Step) -> Any:
        """Return what has arrived at the call's output, and send it on to the call's inputs."""

    def carry(self, step: Step) -> Any:
        """The same for what goes a round of its own: nothing begins at this call."""
        return self.visit(step)

    def rows(self, full: Tensor, axis: int = 0) -> Tensor:
        """Restrict a tensor over the batch to the samples of this sweep."""
        if self.samples is None:
            return full
        return full.index_select(axis, torch.as_tensor(self.samples, device=full.device))

    def arrived(self, step: Step) -> Any:
        """What other calls have sent here; refuses where nothing came, because no loss stands behind it."""
        payload = self.waiting.pop(id(step.record), None)
        if payload is None:
            raise RuntimeError(
                explain(
                    f"Nothing was backpropagated to '{step.record.path}' ({type(step.record.module).__name__}).",
                    "second-order quantities start at an extended loss, and none stands behind this layer.",
                    "call loss_fn = bpk.extend(loss_fn), and use only extended losses behind this layer.",
                )
            )
        return payload

    def relay(self, record: Record, before: Sequence[int]) -> None:
        """More results of a call turn out to be used than `before`, when something was sent to it."""
        if id(record) in self.waiting:
            raise UnsupportedLayer(
                explain(
                    f"Several losses read different results of '{record.path}' ({type(record.module).__name__}).",
                    "what was sent to it stands for those of the first loss only.",
                    "use an extension of another kind, or one loss.",
                )
            )

    def hand_over(self, record: Record) -> Any:
        """What has arrived at a call, for a module extension that a user wrote."""
        raise self.no_module_extension(record)

    def take_back(self, record: Record, sources: dict[int, Source], sent: Any) -> None:
        """Send on what a user's module extension returned for the call's inputs."""
        raise self.no_module_extension(record)

    def no_module_extension(self, record: Record) -> UnsupportedLayer:
        """Only columns and averaged matrices can be handed to user-written module extensions."""
        return UnsupportedLayer(
            explain(
                f"A module extension for '{record.path}' ({type(record.module).__name__}) cannot take part here.",
                "what travels is more than one tensor.",
                "register a rule for the layer instead: bpk.register(Autodiff(...)).",
            )
        )


def collect_rows(sweep: Sweep, source: Source, key: Hashable, mat: Tensor, signs: Tensor | None) -> None:
    """Columns at the end of a stretch, pulled back to the parameters that its functions use."""
    together = sweep.attribution.is_one_sample(source.consumer)
    for param, rows in source.rows(mat, together):
        of_samples = rows if together else sweep.rows(sweep.attribution.by_sample(source.consumer, rows), 1)
        add_direct(sweep, param, source, key, of_samples, signs)


def add_direct(sweep: Sweep, param: Tensor, source: Source, key: Hashable, rows: Tensor, signs: Tensor | None) -> None:
    """Rows `[V, N, *p]` of a parameter that the functions of a stretch use."""
    n = sweep.attribution.batch_size(source.consumer)
    sweep.direct.setdefault(param, Direct(Columns(), n)).arrived.add_own(DIRECT, key, rows, signs)


class Gradient(Sweep):
    """The gradient of each call's output, as one column. Autograd brings it; nothing travels."""

    second_order = False

    @property
    def key(self) -> Hashable:
        return ("gradient", self.samples)

    def start(self, step: Step, loss: Loss) -> None:
        """Nothing to do."""

    def visit(self, step: Step) -> Columns:
        columns = Columns()
        columns.add("gradient", self.rows(step.grad)[None])
        return columns

    def reach(self, source: Source, grad: Tensor) -> None:
        """The gradient at the end of a stretch reaches the parameters that its functions use."""
        collect_rows(self, source, "gradient", grad[None], None)

    def hand_over(self, record: Record) -> None:
        return None


def apart(columns: Tensor, samples: Tensor) -> Tensor:
    """Columns of their own for each row of a sample: `[K, R, ...]` to `[K S, R, ...]`."""
    slot = slots(samples)
    masks = torch.stack([slot == s for s in range(int(slot.max()) + 1)]).to(columns.dtype)  # [S, R]
    return (columns[:, None] * masks.reshape(1, *masks.shape, *[1] * (columns.dim() - 2))).flatten(0, 1)


def matched(mat: Tensor, call: Call) -> Tensor:
    """Bring what has arrived to the precision of the call, if that is higher (autocast)."""
    return mat.to(torch.promote_types(mat.dtype, call.output.dtype))


def positive_scale(step: Step) -> Tensor:
    """The scalar in front of a loss, which a square root needs to be non-negative."""
    if step.grad < 0:
        raise ValueError(
            explain(
                f"The loss '{step.record.path}' enters the objective with the negative factor {float(step.grad):g}.",
                "its generalised Gauss-Newton matrix is negative there and has no square root.",
                "use DiagHessian, BatchDiagHessian, HMP or GGNMP, or keep the factor positive.",
            )
        )
    return step.grad
