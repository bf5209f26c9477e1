"""What a sampled quantity draws at the loss, once more.

An extension with `mc_samples` multiplies random columns `S` of the loss, with `E[S S^T] = H`, by `J^T`. With the same
seed the rule of the loss gives the same `S` again, so that `J^T S` can be compared without any noise. That `S` is right
in expectation is checked at the loss alone, where many draws are cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.call import Call
from bpk.jacobians.loss import Loss
from bpk.rules import REGISTRY
from bpk.verification.objective import Calls, Objective, gradients_of, is_loss
from bpk.verification.problem import Problem
from bpk.verification.split import Split
from bpk.verification.structure import tensors_of

MANY, NUMBERS, AT_ONCE = 20_000, 20_000_000, 500_000
"""Draws that are averaged at the loss, if they are no more than so many numbers; numbers at the same time."""
ERRORS = 8.0
"""How many standard errors the average may be off."""


class Draws:
    """The draws of the only loss of a problem; `at(M, seed)` is `S` as `[M, P]`."""

    def __init__(self, rule: Loss, call: Call, factor: Tensor) -> None:
        self.rule, self.call, self.factor = rule, call, factor
        self.known: tuple[str, int] | None = None

    @classmethod
    def of(cls, problem: Problem) -> Draws | None:
        """From one evaluation; `None` where there are several losses, or several predictions of one."""
        objective = Objective(problem, watch=True)
        live = [call for call in objective.calls if count_live(call) > 0]
        if len(live) != 1 or count_live(live[0]) != 1 or not isinstance(live[0].result, Tensor):
            return None
        if not is_loss(problem.loss) and objective.inside() is None:
            return None
        rule, module, (args, kwargs) = REGISTRY.find(live[0].module), live[0].module, live[0].arguments
        factor = gradients_of(objective.value, [live[0].result])[0]
        if not isinstance(rule, Loss) or factor is None or factor.dim() or factor < 0:
            return None
        binding = rule.bind(module, args, kwargs)
        if binding.problem or not binding.inputs[0].requires_grad or binding.axis(0) != 0:
            return None
        inputs = binding.seen([x.detach() for x in binding.inputs])
        draws = cls(rule, Call(binding.options, inputs, {}, live[0].result.detach()), factor.detach())
        try:
            return None if rule.obstacle(draws.call) or draws.at(1, 0).shape[1] != inputs[0].numel() else draws
        except Exception:  # nothing can be drawn from this loss: what `bpk` does with it will show
            return None

    def at(self, count: int, seed: int) -> Tensor:
        """`[M, P]`: the draws of a backward pass that begins with this seed."""
        torch.manual_seed(seed)
        with torch.no_grad():
            columns = self.rule.sqrt_hessian_sampled(self.call, count)
        return columns.reshape(count, -1) * self.factor.sqrt()

    def judged(self, split: Split, entries: int, seed: int) -> tuple[str, int]:
        """Where the mean of `S S^T` is not the Hessian of the loss, or nothing; and how many draws that took."""
        if self.known is None:
            self.known = self.mistake(split, entries, seed)
        return self.known

    def mistake(self, split: Split, entries: int, seed: int) -> tuple[str, int]:
        """Compare at some entries.

        The mean of `K` products of size at most `b^2` is off by `sqrt(b^2 h / K)`, and by `b^2 / K` through events that
        have not happened.
        """
        size = split.pred.numel()
        where = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:entries].to(split.pred.device)
        total, largest, drawn = split.pred.new_zeros(len(where), size), 0.0, 0
        wanted, step = max(20, min(MANY, NUMBERS // size)), max(1, AT_ONCE // size)
        while drawn < wanted:
            columns = self.at(min(step, wanted), seed + drawn) * min(step, wanted) ** 0.5
            total += columns[:, where].T @ columns
            largest, drawn = max(largest, float(columns.nan_to_num().square().max())), drawn + len(columns)
        for k, e in enumerate(where.tolist()):
            unit = torch.zeros_like(split.pred)
            unit[e] = 1.0
            mine = split.owner == split.owner[e]
            right, mean = split.loss_product(unit)[mine], (total[k] / drawn)[mine]
            scale = float(right.abs().max())
            error = (mean - right).abs()
            allowed = ERRORS * (largest * scale / drawn) ** 0.5 + ERRORS**2 * largest / drawn
            if not bool(((error <= allowed) | ~right.isfinite()).all()):
                at = int(error.nan_to_num(torch.inf).argmax())
                name, found, expected = type(self.call.options).__name__, float(mean[at]), float(right[at])
                about = f"{name}: the mean of {drawn} draws of an entry of the loss Hessian is"
                return f"{about} {found:.6g}, autograd {expected:.6g}", drawn
        return "", drawn


def count_live(call: Calls) -> int:
    """How many tensors a loss was called with that depend on the model."""
    return sum(x.requires_grad for x in tensors_of(call.arguments))
