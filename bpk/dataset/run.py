"""One batch: its passes, and what is taken from them."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from reprlib import repr
from typing import Any

import torch
from torch import Tensor, nn

from bpk.dataset.batches import StepOf, loss_of_pair, moved, note, require_pair, rows_of
from bpk.dataset.model_as_found import Buffers
from bpk.dataset.totals import GRADIENT
from bpk.dataset.watched import NotEmpty, Seen, Watched
from bpk.distributed.processes import Elsewhere
from bpk.extensions.over_batches import Parts, Size
from bpk.jacobians.core.errors import runtime_error, type_error, value_error
from bpk.jacobians.core.nested import mapped, tensors_in
from bpk.jacobians.core.numeric import tracked, wide

DivisorOf = Callable[[Any], float]
"""By what the loss of a batch divides the sum of its terms."""


@dataclass
class OneBatch:
    """What a batch has brought: statistics by field and parameter, its size and its loss."""

    fields: dict[str, dict[str, Parts]]
    size: Size
    loss: float


class Runner:
    """Runs batches through a model, under `context`.

    `first` is what the first batch has shown of its losses, with which others must agree: the first in which some
    target counts. A mean over no targets is NaN, and has no gradient; a runner that `takes_empty` adds its samples.
    """

    takes_empty = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module,
        context: Watched,
        step: StepOf | None,
        device: torch.device | str | None,
        autocast: torch.dtype | None,
        divisor: DivisorOf | str | None,
    ) -> None:
        self.model, self.loss_fn, self.context = model, loss_fn, context
        self.buffers = Buffers(model, loss_fn)
        self.step = loss_of_pair if step is None else step
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.params:
            raise value_error(
                "No parameter of the model requires a gradient.",
                "fields belong to parameters, and are computed where the gradient is.",
                "call model.requires_grad_(), or requires_grad_() of those that are meant.",
            )
        self.device = None if device is None else torch.device(device)
        self.autocast, self.divisor = autocast, divisor
        self.first: Seen | None = None
        self.loss: Any = None

    @property
    def device_of_sums(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.params.values())).device

    def run(self, number: int, batch: Any) -> OneBatch:
        """Forward and backward of one batch; whatever fails says in which one."""
        self.look(number, batch)
        try:
            return self.passed(number, batch)
        except Elsewhere:
            raise
        except Exception as error:
            note(error, number)
            raise
        finally:
            self.buffers.put_back()

    def look(self, number: int, batch: Any) -> None:
        """Refuse a batch of which no loss can be computed."""
        if self.step is loss_of_pair:
            require_pair(number, batch)
        if rows_of(batch) == 0:
            raise not_finite(number, "no samples")

    def passed(self, number: int, batch: Any) -> OneBatch:
        """The passes."""
        if self.device is not None:
            batch = moved(batch, self.device)
        if [x for x in tensors_in(batch) if x.is_inference()]:
            batch = mapped(batch, lambda x: tracked(x) if isinstance(x, Tensor) else x)
        for param in self.params.values():
            param.grad = None
        cast = nullcontext() if self.autocast is None else torch.autocast(self.device_of_sums.type, self.autocast)
        self.context.look_at(batch)
        with torch.enable_grad(), self.context:
            with cast:
                loss = self.step(self.model, self.loss_fn, batch)
            self.loss = loss  # until the next one: freed before, the heap would shrink and grow, page by page
            value = self.checked(number, loss)
            if cmath.isnan(value) and self.divisor is not None and self.given_divisor(number, batch) != 0:
                raise not_finite(number, f"a loss of {value}")
            self.context.must_be_empty = cmath.isnan(value)
            try:
                loss.backward()
            except NotEmpty:
                raise not_finite(number, f"a loss of {value}") from None
        one = OneBatch(self.taken(number), self.size_of(number, batch), value)
        if one.size.divisor == 0:
            self.require_nothing(number, one)
        elif cmath.isnan(value):
            raise not_finite(number, f"a loss of {value}")
        return one

    def require_nothing(self, number: int, one: OneBatch) -> None:
        """Refuse a batch with a divisor of zero that brings more than its samples: a mean over no targets adds none."""
        gradients = [x for parts in one.fields[GRADIENT].values() for x in parts.values()]
        if cmath.isnan(one.loss):
            one.loss = 0.0
        if one.loss or any(bool(x.any()) for x in gradients):
            raise not_finite(number, "a divisor of 0, and a loss or a gradient that is not zero")

    def size_of(self, number: int, batch: Any) -> Size:
        """How large the batch was that has passed."""
        seen = self.context.seen
        self.check_losses(number, seen)
        return seen.size(seen.divisors[0] if self.divisor is None else self.given_divisor(number, batch))

    def checked(self, number: int, loss: Any) -> float:
        """The loss as a number."""
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise value_error(
                f"What was computed for batch {number} is no loss: {described(loss)}.",
                "its backward pass is what gives the fields.",
                "let step(model, loss_fn, batch) return loss_fn(...), a scalar, outside of torch.inference_mode().",
            )
        value: float = loss.item()
        if not (cmath.isfinite(value) or (self.takes_empty and cmath.isnan(value))):
            raise not_finite(number, f"a loss of {value}")
        return value

    def check_losses(self, number: int, seen: Seen) -> None:
        """Refuse a batch without samples or losses, and losses whose batches cannot be weighted alike."""
        if not seen.divisors:
            raise runtime_error(
                f"The pass of batch {number} reached no extended loss.",
                "the loss says how many samples there are, and by what it divides.",
                "compute it with the loss_fn that step(model, loss_fn, batch) is given.",
            )
        if seen.samples < 1:
            raise not_finite(number, "no samples that count")
        if seen == self.first:
            return
        if set(seen.divisors) == {0}:  # no target counts: nothing is to be weighted
            return
        first = self.first = self.first or seen
        share = [(d, d0) for d, d0 in zip(seen.divisors, first.divisors, strict=False) if d is not None and d0]
        alike = [d is None for d in seen.divisors] == [d is None for d in first.divisors]
        ratios = {round(d / d0 / (share[0][0] / share[0][1]), 6) for d, d0 in share}
        if self.divisor is None and None in seen.divisors and any(seen.divisors):
            raise value_error(
                f"Some losses of batch {number} average, and others sum.",
                f"they divide by {seen.divisors} (None: a loss that sums). One large batch would weigh them in "
                "another way than its parts do.",
                "use losses that all average or all sum, or call accumulate(...) for each.",
            )
        if not alike or len(ratios) > 1 or seen.factors != first.factors:
            raise value_error(
                f"The losses of batch {number} are not weighted against each other as those of batch 0.",
                f"they divide by {seen.divisors} and have the factors {seen.factors} in the objective; in batch 0 "
                f"these were {first.divisors} and {first.factors} (None: a loss that sums). One large batch would "
                "weigh them in another way.",
                "use one loss, with the same factor in every batch, or call accumulate(...) for each.",
            )

    def given_divisor(self, number: int, batch: Any) -> float | None:
        """What the user says."""
        if not callable(self.divisor):
            return None
        found = self.divisor(batch)
        try:
            divisor = float(found)
        except (TypeError, ValueError) as error:
            raise type_error(
                f"divisor(batch) returned {repr(found)} for batch {number}.",
                "it is the number by which the loss of the batch divides the sum of its terms.",
                "return a number: divisor=lambda batch: len(batch[0]).",
            ) from error
        if not 0 <= divisor < float("inf"):
            raise not_finite(number, f"a divisor of {divisor}")
        return divisor

    def taken(self, number: int) -> dict[str, dict[str, Parts]]:
        """Statistics of all fields; those of extensions stay on parameters, for the next pass to use their memory."""
        gradients = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        if not all_finite(list(gradients.values())):
            raise not_finite(number, "a gradient that is not finite")
        found: dict[str, dict[str, Parts]] = {GRADIENT: {name: {"": x} for name, x in gradients.items()}}
        for extension in self.context.extensions:
            field = extension.savefield
            known = {name: vars(p)[field] for name, p in self.params.items() if field in vars(p)}
            found[field] = {name: x if isinstance(x, dict) else {"": x} for name, x in known.items()}
        return found


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether all entries are finite: what is not stays in any sum, and a sum is what takes the least time."""
    sums = [wide(x).sum() for x in tensors]
    if sums and sums[0].device.type != "cpu":  # where each number that is read waits for all before it
        sums = [torch.stack([x.to(sums[0].device) for x in sums]).sum()]
    return cmath.isfinite(sum([x.item() for x in sums]))


def described(loss: Any) -> str:
    """A value in a few words."""
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return f"a tensor {list(loss.shape)}" + ("" if loss.requires_grad else " without a graph that leads to parameters")


def not_finite(number: int, what: str) -> ValueError:
    """The refusal of a batch that would spoil all sums."""
    return value_error(
        f"Batch {number} of the loader has {what}.",
        "it would spoil the sums of all batches; nothing of it was added.",
        "look at this batch (numbers count from 0): empty, a mean over no terms ((terms * mask).sum() / mask.sum(): "
        "divide by mask.sum().clamp(min=1)), or inputs, targets or activations that are not finite?",
    )
