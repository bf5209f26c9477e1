"""What a sampled quantity draws at the loss, once more.

An extension with `mc_samples` multiplies random columns `S` of the loss, with `E[S S^T] = H`, by `J^T`. With the same
seed the rule of the loss gives the same `S` again, so that `J^T S` can be compared without any noise. That `S` is right
in expectation is checked at the loss alone, where many draws are cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.call import Call
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import GENERIC_LOSS, Loss
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.rules import REGISTRY
from bpk.sweeps.starts.square_root import random_signs
from bpk.verification.objective import Calls, Objective, gradients_of, is_loss
from bpk.verification.problem import NoReference, Problem, differentiable_twice
from bpk.verification.split import Split

MANY, NUMBERS, AT_ONCE = 20_000, 20_000_000, 500_000
"""Draws that are averaged at the loss, if they are no more than so many numbers; numbers at the same time."""
ERRORS = 8.0
"""How many standard errors the average may be off."""


@dataclass(frozen=True)
class Part:
    """The call of one loss as one of its predictions, side by side, and the factor with which it enters the objective.

    The factor may be one of each term: `[N, *d]` of a cross-entropy, else of each entry. `order` says which inputs of
    the loss its predictions are, in the order of its arguments.
    """

    joint: Joint
    order: Sequence[int]
    factor: Tensor

    @classmethod
    def of(cls, seen: Calls, factor: Tensor | None, of_loss: bool) -> Part | None:
        """From what the loss was called with; `None` where nothing can be drawn."""
        layer = None if factor is None else seen.as_layer(factor)
        if layer is None:
            return None
        seen, factor = layer
        loss, live = seen.function, seen.live
        assert isinstance(loss, nn.Module)
        rule = REGISTRY.find(loss) or GENERIC_LOSS
        if seen.result.dim() or bool((factor < 0).any()) or not isinstance(rule, Loss):
            return None
        binding = rule.bind(loss, *seen.arguments)
        places = {id(x): k for k, x in enumerate(binding.inputs)}
        order = [places.get(id(x), -1) for x in live]
        strange = -1 in order or len({*order}) < len(order) or any(binding.axis(k) != 0 for k in order)
        if binding.problem or strange:
            return None
        inputs = binding.seen([x.detach() for x in binding.inputs])
        try:
            joint = rule.joint(Call(binding.options, inputs, {}, seen.result.detach()), sorted(order))
            part = cls(joint, order, factor.detach())
            if joint.rule.obstacle(joint.call) or part.draw(1, of_loss).shape[1] != sum(x.numel() for x in live):
                return None
            return part if not of_loss or part.is_steady() else None
        except Exception:  # nothing can be drawn from this loss: what `bpk` does with it will show
            return None

    def draw(self, count: int, of_loss: bool) -> Tensor:
        """`[M, P]` of the predictions of this loss; or random signs in their place."""
        with torch.no_grad():
            if of_loss:
                root = self.factor.sqrt()
                columns = self.joint.rule.sqrt_hessian_sampled(self.joint.call, count)
                columns = columns * (root.unsqueeze(1) if 0 < root.dim() < columns.dim() - 1 else root)
            else:
                columns = random_signs(self.joint.call.inputs[0], count)
        parts = self.joint.split(columns)
        return torch.cat([parts[k].reshape(count, -1) for k in self.order], 1)

    def is_steady(self) -> bool:
        """Whether draws are the same where the prediction is rounded in another way.

        They are not where eigenvalues of a Hessian that is decomposed all but coincide: its eigenvectors are any.
        """
        x, *others = self.joint.call.inputs
        eps = torch.finfo(x.dtype).eps
        moved = Call(self.joint.call.options, [x * (1 + 16 * eps * x.sin()), *others], {}, self.joint.call.output)
        other = Part(replace(self.joint, call=moved), self.order, self.factor)
        torch.manual_seed(0)
        here = self.draw(1, True)
        torch.manual_seed(0)
        scale = float(here.nan_to_num().abs().max())
        return torch.allclose(other.draw(1, True), here, rtol=0, atol=eps**0.5 * scale, equal_nan=True)


class Draws:
    """The draws of all losses of a problem (`of_loss`), or signs; `order` is that in which a pass comes to the losses.

    They depend on which predictions are reached: `whole` says that there is one alone.
    """

    def __init__(self, parts: Sequence[Part], order: Sequence[int], of_loss: bool) -> None:
        self.parts, self.order, self.of_loss = parts, order, of_loss
        self.whole = sum(len(part.order) for part in parts) == 1
        self.known: tuple[str, int] | None = None

    @classmethod
    @differentiable_twice()
    def of(cls, problem: Problem, of_loss: bool) -> Draws | None:
        """From one evaluation; `None` where what is drawn cannot be known."""
        objective = Objective(problem, watch=True)
        live = [call for call in objective.calls if call.live and isinstance(call.result, Tensor)]
        if objective.is_picked:
            live = [] if objective.at_calls() is None else [objective.calls[k] for k in objective.factors]
        elif not is_loss(problem.loss) and objective.inside() is None:
            live = objective.as_one()
        value = objective.value
        if not live or any(g is None for call in live for g in gradients_of(value, call.live)):
            return None
        factors = gradients_of(value, [call.result for call in live])
        parts = [Part.of(call, factor, of_loss) for call, factor in zip(live, factors, strict=True)]
        known = [part for part in parts if part is not None]
        return cls(known, visited(value, live), of_loss) if len(known) == len(live) else None

    def at(self, count: int, seed: int) -> Tensor:
        """`[L M, P]`: the draws of a backward pass that begins with this seed, from each of `L` losses, or signs."""
        torch.manual_seed(seed)
        drawn = {k: self.parts[k].draw(count, self.of_loss) for k in self.order}
        return torch.block_diag(*(drawn[k] for k in range(len(self.parts)))) if len(drawn) > 1 else drawn[0]

    def judged(self, split: Split, entries: int, seed: int) -> tuple[str, int]:
        """Where the mean of `S S^T` is not the Hessian of the loss (of signs: `I`), or nothing; and of how many."""
        if self.known is None:
            self.known = self.mistake(split, entries, seed)
        return self.known

    def mistake(self, split: Split, entries: int, seed: int) -> tuple[str, int]:
        """Compare at some entries, among them the one with the largest draws: of small ones no more is known.

        The mean of `K` products of size at most `b^2` is off by `sqrt(b^2 h / K)`, and by `b^2 / K` through events that
        have not happened. Where predictions are too certain for any to happen, their size is not known.

        Raises:
            NoReference: If that is so at all entries.
        """
        size = split.pred.numel()
        wanted = max(20, min(MANY, NUMBERS // size))
        step = min(wanted, max(1, AT_ONCE // (size * len(self.parts))))
        first = self.at(step, seed).nan_to_num().square().sum(0).argmax()
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu").to(first)
        where = torch.cat([first[None], order[order != first]])[:entries]
        total, largest, drawn = split.pred.new_zeros(len(where), size), 0.0, 0
        while drawn < wanted:
            columns = self.at(step, seed + drawn) * step**0.5
            total += columns[:, where].T @ columns
            largest, drawn = max(largest, float(columns.nan_to_num().square().max())), drawn + step
        told, rare = False, False
        for k, e in enumerate(where.tolist()):
            unit = torch.zeros_like(split.pred)
            unit[e] = 1.0
            mine = split.owner == split.owner[e]
            right, mean = (split.loss_product(unit) if self.of_loss else unit)[mine], (total[k] / drawn)[mine]
            scale = float(right.abs().max())
            error = (mean - right).abs()
            allowed = ERRORS * (largest * scale / drawn) ** 0.5 + ERRORS**2 * largest / drawn
            right_here = bool(((error <= allowed) | ~right.isfinite()).all())
            hardly_any = not right_here and self.of_loss and float(mean.abs().max()) < scale / 2
            if hardly_any and is_certain(split, unit, scale, ERRORS**2 * int(mine.sum()) / drawn):
                rare = True
                continue
            told = told or bool((error < right.abs()).any())
            if not right_here:
                at = int(error.nan_to_num(torch.inf).argmax())
                what, who = ("the loss Hessian", "autograd") if self.of_loss else ("the identity", "right")
                about = f"the mean of {drawn} draws of an entry of {what} is"
                return f"{about} {float(mean[at]):.6g}, {who} {float(right[at]):.6g}", drawn
        if rare and not told:
            raise NoReference("draws hardly differ: the predictions are too certain")
        return "", drawn


def is_certain(split: Split, unit: Tensor, scale: float, share: float) -> bool:
    """Whether a row of the loss Hessian is a small share of what it is at predictions of zero, which say nothing."""
    point = torch.zeros_like(split.pred).requires_grad_()
    try:
        slope = torch.autograd.grad(split.value(point), point, create_graph=True)[0]
        elsewhere = gradients_of(slope, [point], unit)[0]
    except Exception:  # whatever the user's loss raises there
        return False
    size = 0.0 if elsewhere is None else float(elsewhere.abs().max())
    return scale < min(share, 0.1) * size < float("inf")


def visited(value: Tensor, calls: Sequence[Calls]) -> list[int]:
    """The order in which a backward pass comes to the losses: of terms, to the number that adds them up."""
    ends: dict[Node, int] = {call.result.grad_fn: k for k, call in enumerate(calls)}
    passed: list[Node] = []

    def note(node: Node) -> None:
        passed.append(node)

    nodes = () if value.grad_fn is None else between(value.grad_fn, ends.__contains__)
    handles = [node.register_prehook(lambda grads, node=node: note(node)) for node in (*nodes, *ends)]
    gradients_of(value, [x for call in calls for x in call.live])
    for handle in handles:
        handle.remove()
    numbers = {node for node in passed if not any(map(len, engine.output_shapes(node)))}
    order: dict[int, int] = {}
    for place, node in enumerate(passed):
        if node in numbers:
            inside = {above for above, _ in node.next_functions if above is not None} - numbers
            reached = [node, *(here for one in inside for here in between(one, numbers.__contains__))]
            order |= {ends[here]: place for here in reached if here in ends}
    return sorted(order, key=order.__getitem__)
