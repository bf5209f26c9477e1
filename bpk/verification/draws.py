"""What a sampled quantity draws at the loss, once more.

An extension with `mc_samples` multiplies random columns `S` of the loss, with `E[S S^T] = H`, by `J^T`. With the same
seed the rule of the loss gives the same `S` again, so that `J^T S` can be compared without any noise. That `S` is right
in expectation is checked at the loss alone, where many draws are cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.losses.loss import Loss
from bpk.rules import REGISTRY
from bpk.sweeps.starts.square_root import random_signs
from bpk.verification.objective import Calls, Objective, gradients_of, is_loss
from bpk.verification.problem import Problem, differentiable_twice
from bpk.verification.split import Split
from bpk.verification.structure import tensors_of

MANY, NUMBERS, AT_ONCE = 20_000, 20_000_000, 500_000
"""Draws that are averaged at the loss, if they are no more than so many numbers; numbers at the same time."""
ERRORS = 8.0
"""How many standard errors the average may be off."""


@dataclass(frozen=True)
class Part:
    """The call of one loss, and the factor with which it enters the objective."""

    rule: Loss
    call: Call
    factor: Tensor

    @classmethod
    def of(cls, seen: Calls, factor: Tensor | None) -> Part | None:
        """From what the loss was called with; `None` where it has several predictions, or nothing can be drawn."""
        rule = REGISTRY.find(seen.module)
        if factor is None or factor.dim() or factor < 0 or not isinstance(rule, Loss) or len(live_in(seen)) != 1:
            return None
        binding = rule.bind(seen.module, *seen.arguments)
        if binding.problem or not binding.inputs[0].requires_grad or binding.axis(0) != 0:
            return None
        inputs = binding.seen([x.detach() for x in binding.inputs])
        part = cls(rule, Call(binding.options, inputs, {}, seen.result.detach()), factor.detach())
        try:
            return None if rule.obstacle(part.call) or part.draw(1).shape[1] != inputs[0].numel() else part
        except Exception:  # nothing can be drawn from this loss: what `bpk` does with it will show
            return None

    def draw(self, count: int) -> Tensor:
        """`[M, P]` of the prediction of this loss."""
        with torch.no_grad():
            columns = self.rule.sqrt_hessian_sampled(self.call, count)
        return columns.reshape(count, -1) * self.factor.sqrt()

    def signs(self, count: int) -> Tensor:
        """Random signs in their place."""
        return random_signs(self.call.inputs[0], count).reshape(count, -1)


class Draws:
    """The draws of all losses of a problem; `order` is that in which a backward pass comes to them."""

    def __init__(self, parts: Sequence[Part], order: Sequence[int]) -> None:
        self.parts, self.order = parts, order
        self.known: dict[bool, tuple[str, int]] = {}

    @classmethod
    @differentiable_twice()
    def of(cls, problem: Problem) -> Draws | None:
        """From one evaluation; `None` where what is drawn cannot be known."""
        objective = Objective(problem, watch=True)
        live = [call for call in objective.calls if live_in(call) and isinstance(call.result, Tensor)]
        if not live or (not is_loss(problem.loss) and objective.inside() is None):
            return None
        factors = gradients_of(objective.value, [call.result for call in live])
        parts = [Part.of(call, factor) for call, factor in zip(live, factors, strict=True)]
        known = [part for part in parts if part is not None]
        return cls(known, visited(objective.value, live)) if len(known) == len(live) else None

    def at(self, count: int, seed: int, of_loss: bool = True) -> Tensor:
        """`[L M, P]`: the draws of a backward pass that begins with this seed, from each of `L` losses, or signs."""
        torch.manual_seed(seed)
        drawn = {k: self.parts[k].draw(count) if of_loss else self.parts[k].signs(count) for k in self.order}
        return torch.block_diag(*(drawn[k] for k in range(len(self.parts)))) if len(drawn) > 1 else drawn[0]

    def judged(self, split: Split, entries: int, seed: int, of_loss: bool = True) -> tuple[str, int]:
        """Where the mean of `S S^T` is not the Hessian of the loss (of signs: `I`), or nothing; and of how many."""
        if of_loss not in self.known:
            self.known[of_loss] = self.mistake(split, entries, seed, of_loss)
        return self.known[of_loss]

    def mistake(self, split: Split, entries: int, seed: int, of_loss: bool) -> tuple[str, int]:
        """Compare at some entries.

        The mean of `K` products of size at most `b^2` is off by `sqrt(b^2 h / K)`, and by `b^2 / K` through events that
        have not happened.
        """
        size = split.pred.numel()
        where = torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu")[:entries].to(
            split.pred.device
        )
        total, largest, drawn = split.pred.new_zeros(len(where), size), 0.0, 0
        wanted = max(20, min(MANY, NUMBERS // size))
        step = min(wanted, max(1, AT_ONCE // (size * len(self.parts))))
        while drawn < wanted:
            columns = self.at(step, seed + drawn, of_loss) * step**0.5
            total += columns[:, where].T @ columns
            largest, drawn = max(largest, float(columns.nan_to_num().square().max())), drawn + step
        for k, e in enumerate(where.tolist()):
            unit = torch.zeros_like(split.pred)
            unit[e] = 1.0
            mine = split.owner == split.owner[e]
            right, mean = (split.loss_product(unit) if of_loss else unit)[mine], (total[k] / drawn)[mine]
            scale = float(right.abs().max())
            error = (mean - right).abs()
            allowed = ERRORS * (largest * scale / drawn) ** 0.5 + ERRORS**2 * largest / drawn
            if not bool(((error <= allowed) | ~right.isfinite()).all()):
                at = int(error.nan_to_num(torch.inf).argmax())
                what, who = ("the loss Hessian", "autograd") if of_loss else ("the identity", "right")
                about = f"the mean of {drawn} draws of an entry of {what} is"
                return f"{about} {float(mean[at]):.6g}, {who} {float(right[at]):.6g}", drawn
        return "", drawn


def live_in(call: Calls) -> list[Tensor]:
    """The tensors a loss was called with that depend on the model."""
    return [x for x in tensors_of(call.arguments) if x.requires_grad]


def visited(value: Tensor, calls: Sequence[Calls]) -> list[int]:
    """The order in which a backward pass comes to the losses."""
    order: list[int] = []

    def note(number: int) -> None:
        order.append(number)

    handles = [call.result.register_hook(lambda grad, k=k: note(k)) for k, call in enumerate(calls)]
    gradients_of(value, [x for call in calls for x in live_in(call)])
    for handle in handles:
        handle.remove()
    return order
