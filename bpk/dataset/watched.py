"""A backward pass whose fields are what adds up over batches, and which says how large its batch was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.backward import Backward
from bpk.context import backpack
from bpk.distributed.sharded import Sharded
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import Size
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.loss import Loss
from bpk.plan.support import require_axis
from bpk.plan.survey import mixes
from bpk.recording.context.opened import Pass
from bpk.recording.context.told import Told
from bpk.recording.graph.known_gradient import KnownGradient
from bpk.recording.membership import where_is
from bpk.recording.record import Record

SamplesOf = Callable[[Any], "int | Tensor | tuple[int, Tensor]"]
"""Of a batch: of which samples the rows of its loss are, as in `bpk.backpack`."""


class NotEmpty(Exception):
    """The objective is NaN, although targets count."""


@dataclass
class Seen:
    """What a pass has found out about its batch.

    `samples` are those of the losses. `divisors` has for each loss by what it divides (`None`: it sums), and `factors`
    its factor in the objective.
    """

    samples: int = 0
    divisors: list[float | None] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def size(self, divisor: float | None) -> Size:
        """The size of the batch, with this divisor."""
        return Size(self.samples, divisor)


class Watched(backpack):
    """A context for one backward pass; `seen` is what it has found out.

    `asks` says whether losses are asked by what they divide, and `add_up` what is done with sharded parameters. Where
    the objective is NaN, it `must_be_empty`: a mean over no targets. The user may say of a batch where `samples` are.
    """

    def __init__(
        self,
        *extensions: BackpropExtension,
        asks: bool = True,
        chunk_size: int | None = None,
        memory: int | None = None,
        samples: SamplesOf | None = None,
    ) -> None:
        super().__init__(*extensions, chunk_size=chunk_size, memory=memory)
        self.adds_up = True
        self.asks, self.samples = asks, samples
        self.seen = Seen()
        self.must_be_empty = False
        self.looked = False  # at the first batch, of which all others have the form
        self.add_up: Callable[[Sharded], None] | None = None

    def look_at(self, batch: Any) -> None:
        """The next pass will be that of this batch."""
        self.told = None if self.samples is None else Told.of(self.samples(batch))

    def begin(self, task: int, under_way: dict[int, Pass]) -> Backward:
        self.seen = Seen()
        return WatchedBackward(self, task, under_way)


class WatchedBackward(Backward):
    """The pass."""

    context: Watched

    def inspect(self, root: Record, node: Node) -> None:
        seen, inspection = self.context.seen, self.inspection
        before = set(inspection.above)
        super().inspect(root, node)
        touched = next(iter(inspection.outside.calls), None)
        if self.context.asks and touched is not None and inspection.outside.losses:
            raise UnsupportedLayer(
                f"A part of the objective reaches '{touched.path}' ({type(touched.module).__name__}) without "
                "passing an extended loss.",
                "it does not tell by what it divides, and so not how batches are weighted.",
                "extend every loss (bpk.extend), call accumulate(...) for each, or say divisor=.",
            )
        for loss, above in inspection.above.items():
            if loss in before:  # it may be let go by now
                continue
            mixing = [record.module for record in above if mixes(record)]
            if inspection.merged is not None or mixing:
                raise mixed([*inspection.left, *mixing][-1:])
            if not self.context.extensions and not self.context.looked:  # these would look for it themselves
                require_axis((), (*above, loss))
            if isinstance(loss.rule, Loss):
                if self.context.asks and loss.output.dim():
                    raise not_one_number(loss)
                seen.samples = inspection.attribution.batch_size(loss)
                divisor = loss.rule.divides_by(loss.call()) if self.context.asks else None
                seen.divisors.append(None if divisor is None else float(divisor))
        if self.context.must_be_empty and self.context.asks and any(divisor != 0 for divisor in seen.divisors):
            raise NotEmpty
        self.context.looked = True

    def work_on(self, record: Record, grad: Tensor) -> KnownGradient | None:
        if record.is_loss and isinstance(record.rule, Loss) and not grad.dim():  # of each sample: the user tells
            self.context.seen.factors.append(grad.item())
        return super().work_on(record, grad)

    def ending(self, sharded: Sharded) -> Callable[[], None]:
        assert self.context.add_up is not None
        return partial(self.context.add_up, sharded)


def not_one_number(loss: Record) -> UnsupportedLayer:
    """The refusal of a loss with `reduction="none"`, of which a step makes one number."""
    return UnsupportedLayer(
        f"The loss '{loss.path}' ({type(loss.module).__name__}) returned shape {list(loss.output.shape)}.",
        "what is made of these numbers does not tell by what it divides, and so not how batches are weighted.",
        "use reduction='mean' or reduction='sum', or say divisor=lambda batch: len(batch[0]) where it is a mean "
        'over samples, divisor="sum" where it is a sum.',
    )


def mixed(modules: list[nn.Module]) -> UnsupportedLayer:
    """The refusal where what a sample adds depends on who else is in its batch."""
    where = where_is(modules[0]) if modules else "A function of the model"
    return UnsupportedLayer(
        f"{where} mixes the samples of a batch, so that batches do not add up to a data set.",
        "what a sample contributes depends on the others in its batch: one large batch would give something else.",
        "call model.eval(), or replace the layer, such as BatchNorm by GroupNorm.",
    )
