"""Products with transposed Jacobians (the "L-operator"): one backward pass each."""

from __future__ import annotations

from torch import Tensor

from bpk.hessianfree.vectors import Tensors, as_list, as_vectors, derivatives


def L_op(ys: Tensors, xs: Tensors, ws: Tensors, retain_graph: bool = True, detach: bool = True) -> tuple[Tensor, ...]:
    """`J^T w` with `J = d ys / d xs`, by one backward pass.

    Args:
        ys: Tensors that autograd knows as functions of `xs`.
        xs: What to differentiate with respect to.
        ws: One tensor per `y`, of its shape.
        retain_graph: Keep the graph for another product.
        detach: Whether the result is cut off the graph. Otherwise it can be differentiated further.

    Returns:
        One tensor per `x`, of its shape; zeros for an `x` that no `y` depends on.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> L_op(x**2, x, torch.tensor([1.0, 10.0]))
    (tensor([ 2., 40.]),)
    """
    where = "transposed_jacobian_vector_product"
    ys, xs = as_list(ys, where, "functions"), as_list(xs, where, "variables")
    ws = as_vectors(ws, ys, "functions", where)
    return derivatives(ys, xs, ws, create_graph=not detach, retain_graph=retain_graph)


def transposed_jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """`J^T v` with `J = d f / d x`: one tensor per `x`, of its shape. See `L_op`.

    >>> import torch
    >>> w = torch.ones(3, 2, requires_grad=True)
    >>> transposed_jacobian_vector_product(w @ torch.tensor([1.0, 2.0]), w, torch.tensor([1.0, 0.0, 3.0]))
    (tensor([[1., 2.],
            [0., 0.],
            [3., 6.]]),)
    """
    return L_op(f, x, v, retain_graph=retain_graph, detach=detach)
