"""Products with the Hessian, without the Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bpk.hessianfree.vectors import Tensors, as_list, as_vectors, derivatives
from bpk.jacobians.core.errors import value_error


@torch.inference_mode(False)  # no graph of derivatives is built in that mode: they would be zero
def hessian_vector_product(
    f: Tensor,
    params: Tensors,
    v: Tensors,
    grad_params: Tensor | Iterable[Tensor | None] | None = None,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """`H v` with `H = d2 f / d params2`, as the gradient of `g^T v` with `g = d f / d params`.

    Args:
        f: A scalar.
        params: The parameters, or one tensor.
        v: One tensor per parameter, of its shape.
        grad_params: The gradient `g`, if it was computed already with `create_graph=True`; saves a backward pass
            when several products with one Hessian are needed. `None` where `f` does not depend on a parameter
            (`torch.autograd.grad(..., allow_unused=True)`).
        detach: Whether the result is cut off the graph. Otherwise it can be differentiated further.

    Returns:
        One tensor per parameter, of its shape; zeros for parameters that the gradient does not depend on.

    Source: Pearlmutter (1994), Fast exact multiplication by the Hessian.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hessian_vector_product((x**3).sum(), x, torch.tensor([1.0, 10.0]))
    (tensor([  6., 120.]),)
    """
    where = "hessian_vector_product"
    params = as_list(params, where, "parameters")
    [f] = as_list([f], where, "function")
    v = as_vectors(v, params, "parameters", where)
    if f.numel() != 1:
        raise value_error(
            f"{where} got a function of shape {list(f.shape)}.",
            "only a scalar has a Hessian.",
            "pass a scalar, such as loss.mean() or loss.sum().",
        )
    if not f.requires_grad and any(p.requires_grad for p in params):
        raise value_error(
            f"{where} got a function that autograd does not know as one of anything.",
            "it was detached, or computed under torch.no_grad(), and its Hessian would be zero.",
            "pass what the loss returns, computed where gradients are enabled.",
        )
    gradient = None if grad_params is None else given_gradient(grad_params, params, where)
    if gradient is None or not any(g.requires_grad for g in gradient):  # perhaps computed without create_graph
        gradient = list(derivatives([f], params, [torch.ones_like(f)], create_graph=True))
    return derivatives(gradient, params, v, create_graph=not detach)


def given_gradient(given: Tensor | Iterable[Tensor | None], params: Sequence[Tensor], where: str) -> list[Tensor]:
    """A gradient that was computed already, with zeros where there is none."""
    several = [given] if isinstance(given, Tensor) or not isinstance(given, Iterable) else given
    found = [torch.zeros_like(params[k]) if g is None and k < len(params) else g for k, g in enumerate(several)]
    return as_vectors(found, params, "parameters (grad_params)", where)
