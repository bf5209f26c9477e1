"""What the loss sees: the tensors at which an objective is split into a network below and a loss above.

For gradients and Hessians that is the output of the model. The GGN depends on where the split is: it is `J^T H J` with
the Jacobian `J` of what a loss module takes. Where `loss` is a module of one's own that calls losses of `torch.nn`, and
the objective is a sum of these with constant factors, the split is at their predictions. Where a function stands in the
place of the module, which picks the loss that the model has computed, losses are looked for in the model, too; their
predictions are then where gradients and Hessians are split by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.engine import formats
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.second_order.graph import between
from bpk.plan.parts import in_parts
from bpk.rules import REGISTRY
from bpk.verification.picked import Calls, Picked, Watched
from bpk.verification.problem import Arguments, Problem, with_tensors

UNKNOWN_LOSS = "the loss is no weighted sum of known ones that functions compute (F.cross_entropy, F.mse_loss, ...)"
"""Why there is no GGN of it."""


@dataclass
class Points:
    """Tensors that carry the graph of the model, and the objective as a function of their values."""

    tensors: list[Tensor]
    value: Callable[[Sequence[Tensor]], Tensor]
    again: Callable[[Arguments], list[Tensor]]
    """The same tensors for other inputs."""
    loss: nn.Module | None = None
    """The loss that takes them, if it is known, and one alone that takes one."""


class Objective:
    """One evaluation of model and loss; `watch` looks at the call of a loss that `bpk` knows itself, too."""

    def __init__(self, problem: Problem, watch: bool = False) -> None:
        self.problem = problem
        self.is_picked, self.is_known = isinstance(problem.loss, Picked), True
        known = is_loss(problem.loss)
        self.inner = [m for m in problem.loss.modules() if is_loss(m)] if watch or not known else []
        self.output, self.value, self.calls = self.evaluate()
        found = tensors_in(self.output)
        self.factors: dict[int, Tensor] = {}
        self.live = [k for k, x in enumerate(found) if x.requires_grad and x.is_floating_point()]
        self.outputs = [found[k] for k in self.live]

    def evaluate(self, inputs: Arguments | None = None) -> tuple[Any, Tensor, list[Calls]]:
        """What the model returns, the loss, and the calls of losses inside of that; of functions, inside of both."""
        if not self.is_picked:
            output = self.problem.predict(inputs)
            return output, *self.watched(output)
        calls: list[Calls] = []
        with Watched(lambda *seen: calls.append(Calls(*seen))):
            output = self.problem.predict(inputs)
            return output, self.problem.objective(output), calls

    def watched(self, output: Any) -> tuple[Tensor, list[Calls]]:
        """The loss, and the calls of loss modules inside of it."""
        calls: list[Calls] = []

        def see(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            calls.append(Calls(module, (args, kwargs), result))

        handles = [module.register_forward_hook(see, with_kwargs=True) for module in self.inner]
        try:
            return self.problem.objective(output), calls
        finally:
            for handle in handles:
                handle.remove()

    def as_one(self) -> list[Calls]:
        """The call of the user's loss itself, evaluated again: without a rule, it is one loss for `bpk`."""
        self.inner = [self.problem.loss]
        self.value, self.calls = self.watched(self.output)
        return self.calls

    def points(
        self, seen: Any, kept: Sequence[int], value: Callable[[Any], Tensor], again: Callable[[Arguments], Any]
    ) -> Points:
        """Some of the tensors of a structure, of which the objective is a `value`; `again` makes it of other inputs."""

        def objective(tensors: Sequence[Tensor]) -> Tensor:
            return value(replaced(seen, dict(zip(kept, tensors, strict=True))))

        def at(inputs: Arguments) -> list[Tensor]:
            other = tensors_in(again(inputs))
            return [other[k] for k in kept]

        found = tensors_in(seen)
        return Points([found[k] for k in kept], objective, at)

    def whole(self) -> Points:
        """The parts of the model's output on which the loss depends.

        Raises:
            ValueError: If there is none.
        """
        kept = [k for k, g in zip(self.live, gradients_of(self.value, self.outputs), strict=True) if g is not None]
        if not kept:
            raise value_error(
                f"verify(...): the loss does not depend on what the model returned ({type(self.output).__name__}).",
                "the loss is a function of the tensors of real numbers that the model returns.",
                "return them from forward(), as a tensor, a tuple, a list, a dict or a dataclass.",
            )
        if self.is_picked:
            inside = self.at_calls()
            self.is_known = inside is not None
            if inside is not None:
                return inside
        points = self.points(self.output, kept, self.problem.objective, self.problem.predict)
        return replace(points, loss=self.problem.loss if is_loss(self.problem.loss) and len(kept) == 1 else None)

    def inside(self) -> Points | None:
        """The predictions of the losses that the user's loss adds up; `None` where it does something else."""
        values = [call.result for call in self.calls]
        if self.is_picked or not all(isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad for x in values):
            return None
        return self.at_calls()

    def at_calls(self) -> Points | None:
        """The predictions of those calls of losses whose results enter the objective with constant factors.

        `None` where they are not all of it.
        """
        found = gradients_of(self.value, [call.result for call in self.calls], create_graph=True)
        given = [x for call in self.calls for x in call.live]
        known = {k: c for k, c in enumerate(found) if c is not None and not self.calls[k].is_penalty}
        factors = {k: c.detach() for k, c in known.items() if is_constant(c, given)}
        self.factors = factors
        if not factors:
            return None
        calls = [self.calls[k] for k in factors]
        total = torch.stack([(c * self.calls[k].result).sum() for k, c in factors.items()]).sum()
        ends = [p for p in self.problem.model.parameters() if p.requires_grad] if self.is_picked else self.outputs
        pairs = zip(gradients_of(self.value, ends), gradients_of(total, ends), strict=True)
        if not all(same(left, right) for left, right in pairs):
            return None

        def value(seen: Sequence[Any]) -> Tensor:
            called = zip(calls, factors.values(), seen, strict=True)
            return torch.stack([(c * call.function(*args, **kwargs)).sum() for call, c, (args, kwargs) in called]).sum()

        def again(inputs: Arguments) -> list[Any]:
            other = self.evaluate(inputs)[2]
            return [other[k].arguments for k in factors]

        seen = [call.arguments for call in calls]
        kept = [k for k, x in enumerate(tensors_in(seen)) if x.requires_grad]
        points, loss = self.points(seen, kept, value, again), calls[0].function
        is_only = len(calls) == len(kept) == 1
        return replace(points, loss=loss if is_only and isinstance(loss, nn.Module) else None)


def is_constant(factor: Tensor, wrt: Sequence[Tensor]) -> bool:
    """Whether a factor does not depend on what losses take; it may have a graph all the same, of derivatives zero."""
    if not factor.requires_grad:
        return True
    weights = torch.linspace(1, 2, factor.numel()).to(factor).reshape(factor.shape)
    try:
        return not any(g is not None and g.any() for g in gradients_of(factor, wrt, weights))
    except RuntimeError:  # no function that is linear lacks this derivative
        return False


def is_loss(module: nn.Module) -> bool:
    """Whether this is a loss that `bpk` starts from."""
    return isinstance(REGISTRY.find(module), Loss)


def replaced(value: Any, changed: dict[int, Tensor]) -> Any:
    """A structure with some of its tensors, by their number, replaced."""
    number = count()
    return with_tensors(value, lambda x: changed.get(next(number), x))


def gradients_of(
    value: Tensor, wrt: Sequence[Tensor], vector: Tensor | None = None, create_graph: bool = False
) -> list[Tensor | None]:
    """`J^T vector` of a value, or the gradient of a scalar; `None` where it does not depend.

    Complex numbers count as their real and imaginary parts.
    """
    if not wrt or not value.requires_grad:
        return [None] * len(wrt)
    found = torch.autograd.grad(value, wrt, vector, retain_graph=True, create_graph=create_graph, allow_unused=True)
    return [g if g is None else in_parts(g if g.layout is torch.strided else g.to_dense()) for g in found]


def coarsest(output: Tensor) -> torch.dtype:
    """The shortest of the formats of all results on the way to an output that depend on parameters.

    What comes out is rounded as in this format, by plain autograd as well as by `bpk`, and not always alike: a copy in
    double precision may still go through float32 (a softmax in it).
    """
    nodes = [] if output.grad_fn is None else between(output.grad_fn, lambda _: False)
    seen = {dtype for node in nodes for dtype in formats(node) if dtype.is_floating_point}
    return max(seen, key=lambda dtype: torch.finfo(dtype).eps, default=output.dtype)


def same(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two gradients agree up to rounding."""
    if left is None or right is None:
        return all(g is None or not g.any() for g in (left, right))
    scale = float(left.abs().nan_to_num().max()) if left.numel() else 0.0
    return torch.allclose(left, right, rtol=0, atol=1e3 * torch.finfo(left.dtype).eps * scale, equal_nan=True)
