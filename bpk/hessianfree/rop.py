"""Products with Jacobians (the "R-operator") by two backward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.hessianfree.vectors import Tensors, as_list, as_vectors, derivatives
from bpk.jacobians.core.numeric import placeholder


@torch.inference_mode(False)  # no graph of derivatives is built in that mode: they would be zero
def R_op(ys: Tensors, xs: Tensors, vs: Tensors, retain_graph: bool = True, detach: bool = True) -> tuple[Tensor, ...]:
    """`J v` with `J = d ys / d xs`, by two backward passes.

    `J^T w` is linear in `w`, and its derivative with respect to `w` is `J`; so `J v` is the vector-Jacobian product
    of `w -> J^T w` with `v`. It works on a graph that exists already, where forward mode would need the function.

    Args:
        ys: Tensors that autograd knows as functions of `xs`.
        xs: What to differentiate with respect to.
        vs: One tensor per `x`, of its shape.
        retain_graph: Keep the graph of the intermediate product (that of `ys` is kept in any case).
        detach: Whether the result is cut off the graph. Otherwise it can be differentiated further.

    Returns:
        One tensor per `y`, of its shape; zeros for a `y` that depends on no `x`.

    Source: Pearlmutter (1994), Fast exact multiplication by the Hessian, for the operator.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> R_op([x**2, x.sum()], x, torch.tensor([1.0, 10.0]))
    (tensor([ 2., 40.]), tensor(11.))
    """
    where = "jacobian_vector_product"
    ys, xs = as_list(ys, where, "functions"), as_list(xs, where, "variables")
    vs = as_vectors(vs, xs, "variables", where)
    ws = [placeholder(y) for y in ys]
    pulled = derivatives(ys, xs, ws, create_graph=True)
    return derivatives(pulled, ws, vs, create_graph=not detach, retain_graph=retain_graph)


def jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """`J v` with `J = d f / d x`: one tensor per `f`, of its shape. See `R_op`.

    >>> import torch
    >>> w = torch.zeros(3, 2, requires_grad=True)
    >>> jacobian_vector_product(w @ torch.tensor([1.0, 2.0]), w, torch.ones(3, 2))
    (tensor([3., 3., 3.]),)
    """
    return R_op(f, x, v, retain_graph=retain_graph, detach=detach)
