"""Products with the Hessian, without the Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.hessianfree.vectors import Tensors, as_list, as_vectors, derivatives
from bpk.jacobians.core.errors import value_error


@torch.inference_mode(False)  # no graph of derivatives is built in that mode: they would be zero
def hessian_vector_product(
    f: Tensor, params: Tensors, v: Tensors, grad_params: Tensors | None = None, detach: bool = True
) -> tuple[Tensor, ...]:
    """`H v` with `H = d2 f / d params2`, as the gradient of `g^T v` with `g = d f / d params`.

    Args:
        f: A scalar.
        params: The parameters, or one tensor.
        v: One tensor per parameter, of its shape.
        grad_params: The gradient `g`, if it was computed already with `create_graph=True`; saves a backward pass
            when several products with one Hessian are needed.
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
    gradient = None if grad_params is None else as_vectors(grad_params, params, "parameters (grad_params)", where)
    if gradient is None or not any(g.requires_grad for g in gradient):  # perhaps computed without create_graph
        gradient = list(derivatives([f], params, [torch.ones_like(f)], create_graph=True))
    return derivatives(gradient, params, v, create_graph=not detach)
