"""The first look at a problem: how large it is, its gradients, and whether model and loss work at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.nested import tensors_in
from bpk.plan.parts import in_parts
from bpk.recording.context.surroundings import is_scripted
from bpk.verification.objective import coarsest, gradients_of
from bpk.verification.place import Extent
from bpk.verification.problem import Problem, differentiable_twice


@differentiable_twice()
def first_look(problem: Problem) -> tuple[Extent, dict[str, Tensor], torch.dtype]:
    """How large the problem is, the gradient of each parameter, and the shortest format that is computed in.

    Models and losses that fail are refused.
    """
    n, sizes = max(1, problem.inputs.n), [1]

    def see(module: nn.Module, args: object, output: object) -> None:
        sizes.extend(x.numel() // n for x in tensors_in(output))

    leaves = (m for m in problem.model.modules() if not list(m.children()) and not is_scripted(m))
    hooks = [m.register_forward_hook(see) for m in leaves]
    try:
        output = problem.predict()
    except Exception as error:  # whatever the user's model raises
        raise value_error(
            f"The forward pass of a copy of {type(problem.model).__name__} fails: {error}",
            "verify works on a copy, by default in torch.float64, with inputs to match.",
            "pass dtype=None to keep the model's own precision, and data that the model takes.",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    try:
        loss = problem.objective(output)
    except Exception as error:  # whatever the user's loss raises
        given = in_words(problem.targets[0] if len(problem.targets) == 1 else problem.targets)
        raise value_error(
            f"{problem.name_of_loss} fails for what {type(problem.model).__name__} returns "
            f"and {'these targets' if problem.targets else 'no targets'}: {error}",
            f"that is {in_words(output)}; the targets are {given if problem.targets else 'none'}. "
            "The loss is called as loss(output, *targets), "
            "or as loss(*output, *targets) where it takes that many arguments.",
            "pass targets of the shape and dtype that the loss takes beside this output, or another loss module.",
        ) from error
    require_scalar(problem, loss)
    trained = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
    found = zip(trained.items(), gradients_of(loss, list(trained.values())), strict=True)
    gradients = {name: torch.zeros_like(in_parts(p)) if g is None else g for (name, p), g in found}
    columns = sum(x.numel() for x in tensors_in(output) if x.requires_grad)
    return Extent(columns // n, max(sizes)), gradients, coarsest(loss)


def require_scalar(problem: Problem, loss: object) -> None:
    """Refuse a loss that is no scalar."""
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise value_error(
            f"verify(...) needs a scalar loss; {problem.name_of_loss} returned {what}.",
            "second-order quantities are those of one scalar objective.",
            "use reduction='mean' or reduction='sum'.",
        )


def in_words(value: Any) -> str:
    """Its type, shapes and dtypes: `a tensor of shape [3, 4] (float32)`."""
    found = [f"{list(x.shape)} ({str(x.dtype).removeprefix('torch.')})" for x in tensors_in(value)]
    if isinstance(value, Tensor):
        return f"a tensor of shape {found[0]}"
    return f"{type(value).__name__} " + (f"with tensors of shape {', '.join(found)}" if found else "without tensors")
