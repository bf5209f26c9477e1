"""Functions that have no second derivative: said where somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.second_order.corrected import NORMALISATIONS
from bpk.jacobians.second_order.once import refused_as
from bpk.jacobians.second_order.probing import draw
from bpk.plan.graph import Source
from bpk.plan.parts import in_parts
from bpk.recording.context.state import CTX
from bpk.recording.graph.identity import name_of

UNDEFINED = {
    "LogcumsumexpBackward0": "torch's derivatives of the gradient of logcumsumexp are NaN, as functions of its vector."
}
"""Functions whose products with vectors autograd cannot differentiate, as those that outlive a pass have to be."""

CONSTANT = {
    "SparseCooTensorWithDimsAndTensorsBackward0": (
        "torch's gradient of torch.sparse_coo_tensor has no derivative.",
        "torch.zeros(size).index_put(tuple(indices), values, accumulate=True)",
    ),
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": (
        "torch's gradient of F.linear_cross_entropy in chunks (options=) has no derivative.",
        "F.linear_cross_entropy without options",
    ),
}
"""Functions whose gradient autograd takes for a constant, without saying so: why, and what can be written instead."""

ONCE_IN_GRADIENTS = frozenset(name.replace("Backward0", "BackwardBackward0") for name in NORMALISATIONS)
"""What torch calls the gradient of a gradient (where the forward pass asks for one: forces), if its own derivative is
right, and the next one is not: statistics of normalisations count as constants there."""

REFUSAL = "torch::autograd::Error"
"""The node that `once_differentiable` puts behind a gradient."""


def is_marked(source: Source, grad: Tensor) -> bool:
    """Whether a user's function is marked with `once_differentiable`.

    Its gradient then has no graph towards its inputs, as if it were linear. It has one towards an error, however, if
    it is asked for with a gradient that itself requires one.
    """
    waiting = [g.grad_fn for g in source.gradients(grad.detach().requires_grad_())]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name() == REFUSAL:
            return True
        fresh = {above for above, _ in node.next_functions} - seen
        seen |= fresh
        waiting += fresh
    return False


def is_hidden(source: Source, grad: Tensor) -> bool:
    """Whether a user's function hides from autograd how its gradient comes about (`torch.no_grad`, a solver).

    The gradient `J^T u` is linear in `u`: its derivative, times `u`, is itself. What is hidden counts as a constant.
    """
    u = draw(grad.shape, grad, 0).requires_grad_()
    with torch.enable_grad(), CTX.quietly():
        parts = [g * draw(g.shape, g, k + 1) for k, g in enumerate(map(in_parts, source.gradients(u)))]
        values = torch.cat([part.detach().flatten() for part in parts])
        known = [part.sum() for part in parts if part.requires_grad]
        (slope,) = torch.autograd.grad(known, u, allow_unused=True) if known else (None,)
    seen = 0.0 if slope is None else float((slope.conj() * u.detach()).sum().real)
    eps = max(torch.finfo(dtype).eps for dtype in (grad.dtype, torch.float32))  # functions may round in between
    return abs(float(values.sum()) - seen) > eps**0.5 * float(values.abs().sum())


def require_products(source: Source) -> None:
    """Refuse functions that cannot become a linear map: `J u` and `J^T u` are derivatives of each other."""
    require_derivative(source)
    for name in source.functions & UNDEFINED.keys():
        raise UnsupportedLayer(
            f"Products cannot pass a function before {source.consumer.where}.",
            UNDEFINED[name],
            "use a quantity without products (DiagGGNExact, DiagHessian, ...), or write the function with others: "
            "m + (x - m).exp().cumsum(dim).log(), with m = x.amax(dim, keepdim=True).",
        )


def require_derivative(source: Source) -> None:
    """Refuse functions whose gradient is taken for a constant."""
    for name in source.functions & CONSTANT.keys():
        reason, others = CONSTANT[name]
        raise UnsupportedLayer(
            f"A function before {source.consumer.where} cannot be differentiated twice.",
            reason,
            f"use a quantity that differentiates it once (DiagGGNExact, KFAC, ...), or write it with others: {others}.",
        )


def require_curvature(source: Source) -> None:
    """Refuse functions of which torch has a second derivative that is wrong."""
    require_derivative(source)
    if source.functions & ONCE_IN_GRADIENTS:
        raise UnsupportedLayer(
            f"A function before {source.consumer.where} cannot be differentiated twice.",
            "it is the gradient of a normalisation, which the forward pass asks for, and torch takes its "
            "statistics for constants in third derivatives.",
            "use a quantity that differentiates it once (DiagGGNExact, KFAC, ...), or write the normalisation with "
            "other functions: (x - x.mean(-1, keepdim=True)) * (x.var(-1, False, keepdim=True) + eps).rsqrt().",
        )


def require_derivative_of_products(source: Source) -> None:
    """Refuse functions of which products with the Jacobian have derivatives that are wrong."""
    if not source.functions.isdisjoint(NORMALISATIONS):
        raise not_differentiable(source, "torch takes statistics of normalisations for constants in third derivatives")


def not_differentiable(source: Source, reason: str) -> UnsupportedLayer:
    """What to say where fields have no graph of their own."""
    return UnsupportedLayer(
        f"Fields cannot be differentiated behind the nonlinear function before {source.consumer.where}.",
        f"{reason}, and create_graph=True asks for its derivative.",
        "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or leave create_graph out.",
    )


def multiplied(where: str) -> AbstractContextManager[None]:
    """Say what cannot be multiplied with: torch differentiates a second derivative once more for that, and may not."""
    what, do = f"Products cannot pass a function before {where}.", "use a quantity without products (DiagHessian, ...)."
    return refused_as(lambda reason: UnsupportedLayer(what, reason, do))


@contextmanager
def differentiable_twice(source: Source, grad: Tensor) -> Iterator[None]:
    """Say which function has no second derivative. `grad` is the gradient at the end of the stretch."""
    what = f"A function before {source.consumer.where} cannot be differentiated twice."
    do = "use a quantity that differentiates it once (DiagGGNExact, KFAC, ...), or write the function with others."
    with refused_as(lambda reason: UnsupportedLayer(what, reason, do)):
        # those that users wrote have names without a number at the end
        if any(not name_of(type(node)) and node.name().endswith("Backward") for node in source.nodes):
            if is_marked(source, grad):
                raise UnsupportedLayer(what, "it is marked with once_differentiable.", do)
            if is_hidden(source, grad):
                raise UnsupportedLayer(what, "autograd does not see how its gradient is computed.", do)
        yield
