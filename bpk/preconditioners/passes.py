"""Curvature of several backward passes in one step: it adds up as `.grad` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import Parts, Size, Sums
from bpk.fields.local import Local, Noted, known_of, put
from bpk.plan.passes_inside import version


class Passes:
    """Adds up a field over backward passes, from the first one after gradients were cleared on.

    What is proportional to the loss is added, as gradients are; factors of inputs are means over all samples. So passes
    with losses that are divided by their number give the curvature of one batch with all samples. Samples of passes
    that do not use a parameter count, too: in one batch, `A = sum a a^T / N` has all `N`, with zeros for samples that
    were not sent to an expert. How a batch is cut must not change that, and only so is it unbiased.

    Args:
        model: On its parameters the field is.
        extension: The quantity, whose listener this is.
        anew: Called before the first of these passes.
    """

    def __init__(self, model: nn.Module, extension: BackpropExtension, anew: Callable[[], None]) -> None:
        self.model, self.extension, self.anew = model, extension, anew
        self.noted = Noted()
        self.parts: dict[Tensor, Parts] = {}
        self.left: dict[Tensor, tuple[int, int]] = {}  # gradients as the last pass has left them: they may be zero

    def begin(self) -> None:
        """A pass has begun: it is the first one unless some parameter still has a gradient of those before."""
        there = [(p, p.grad) for p in self.parts if p.grad is not None]
        if not any(self.left.get(p) == (id(grad), version(grad)) or bool(grad.any()) for p, grad in there):
            self.clear()
            self.anew()

    def clear(self) -> None:
        """What is there was taken, or belongs to gradients that were cleared."""
        self.parts, self.noted, self.left = {}, Noted(), {}

    def end(self, noted: Noted) -> None:
        """A pass has saved its fields: put sums in their place."""
        field = self.extension.savefield
        now: dict[Tensor, Parts] = {}
        names: dict[Tensor, str] = {}
        for name, p in self.model.named_parameters():
            known = known_of(p, field)
            names[p] = name
            if known is not None and known.noted is noted:
                now[p] = known.adding_up(vars(p)[field])
            self.left[p] = id(p.grad), version(p.grad)
        if not self.parts:
            self.parts, self.noted = now, noted
            return
        sizes = Size(self.noted.samples, None), Size(noted.samples, None)
        before, self.noted = self.parts, both(self.noted, noted)
        for param in {**before, **now}:
            pairs = [(parts[param], n) for parts, n in zip((before, now), sizes, strict=True) if param in parts]
            value, parts = self.added(names[param], pairs, sizes[0] + sizes[1])
            self.parts[param] = parts
            put(param, field, value, Local(self.noted, None if "" in parts else parts))

    def added(self, name: str, pairs: list[tuple[Parts, Size]], whole: Size) -> tuple[Any, Parts]:
        """The field of all passes, and its parts, of those of the passes that use the parameter."""
        rule = self.extension.over_batches
        assert isinstance(rule, Sums)
        (parts, size), *others = pairs
        totals = {name: rule.scaled(parts, size)}
        for more, size_of_more in others:
            rule.add(totals, size, {name: more}, size_of_more)
        together = {part: x / rule.weight(part, whole) for part, x in totals[name].items()}
        return rule.whole(totals[name], whole), together


def both(first: Noted, second: Noted) -> Noted:
    """What is noted of the batches of two passes, as of one batch."""
    divisors = [
        None if a is None or b is None else a + b for a, b in zip(first.divisors, second.divisors, strict=False)
    ]
    problem = first.problem or second.problem
    if [a is None for a in first.divisors] != [b is None for b in second.divisors]:
        problem = problem or "The backward passes of one step have different losses."
    return Noted(first.samples + second.samples, divisors, problem)
