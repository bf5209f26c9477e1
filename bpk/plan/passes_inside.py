"""Functions whose backward pass starts one of its own, which adds to `.grad`: every product with them would, too.

Reversible layers, and checkpoints of packages, run a part of the model anew there and call `torch.autograd.backward`.
Autograd's graph does not say so. A product with a gradient of zeros does, and leaves the values of `.grad` as they are.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.engine import pull_back
from bpk.jacobians.core.errors import runtime_error
from bpk.plan.graph import Source, gradient_edge, zeros_at
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.membership import ExtendedParameters


def require_no_pass_inside(source: Source, extended: ExtendedParameters) -> None:
    """Refuse a stretch that is differentiated by a backward pass which adds to the `.grad` of `extended` parameters.

    Raises:
        RuntimeError: If there is one.
    """
    users = [function for function in map(engine.users_function, map(type, source.nodes)) if function is not None]
    if not users or source.stretch is None:
        return
    before = [(p, p.grad, version(p.grad)) for p in extended.params]
    end = gradient_edge(source.stretch)
    beginnings = [*source.target_edges(), *map(torch.autograd.graph.get_gradient_edge, source.leaves)]
    with CTX.quietly(), suppress(Exception):  # an error comes again where a product is needed
        pull_back([end], beginnings, [zeros_at(end, like=source.consumer.inputs[source.index])])
    changed = [(p, grad) for p, grad, number in before if p.grad is not grad or version(p.grad) != number]
    for param, grad in changed:
        param.grad = grad
    if changed:
        raise refusal(source, users)


def version(grad: Tensor | None) -> int:
    """Grows with every change in place."""
    return 0 if grad is None else grad._version


def refusal(source: Source, users: list[type[Any]]) -> RuntimeError:
    """What the user is told."""
    names = ", ".join(dict.fromkeys(f"'{function.__name__}'" for function in users))
    return runtime_error(
        f"'{source.consumer.path}' is given what comes out of a function ({names}) that starts a backward pass of "
        "its own.",
        "that pass adds to the .grad of parameters whenever bpk asks the function for a product, and sees neither "
        "the loss nor other uses of the parameters.",
        "let the function take the parameters as inputs and return their gradients (torch.autograd.grad in place "
        "of backward), or use the layers without it (reversible=False; "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) saves memory, too).",
    )
