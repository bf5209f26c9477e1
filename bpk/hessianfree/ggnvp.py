"""Products with the generalised Gauss-Newton matrix, without the matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bpk.hessianfree.hvp import hessian_vector_product
from bpk.hessianfree.lop import transposed_jacobian_vector_product
from bpk.hessianfree.rop import jacobian_vector_product
from bpk.hessianfree.vectors import Tensors, as_list, as_vectors
from bpk.jacobians.core.errors import type_error, value_error
from bpk.recording.context.state import CTX


def ggn_vector_product(
    loss: Tensor, output: Tensor, model: nn.Module, vlist: Tensors, detach: bool = True
) -> tuple[Tensor, ...]:
    """`G v` for all trainable parameters of a model, in the order of `model.parameters()`.

    See `ggn_vector_product_from_plist`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> output = model(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> loss = torch.nn.MSELoss(reduction="sum")(output, torch.zeros(2, 1))
    >>> ggn_vector_product(loss, output, model, torch.tensor([[1.0, 0.0]]))  # 2 X^T X v
    (tensor([[2., 4.]]),)
    """
    if not isinstance(model, nn.Module):
        raise type_error(
            f"ggn_vector_product got {type(model).__name__} as model.",
            "the product is with respect to its parameters.",
            "pass an nn.Module; of a list of parameters, ggn_vector_product_from_plist takes it.",
        )
    return ggn_vector_product_from_plist(
        loss, output, [p for p in model.parameters() if p.requires_grad], vlist, detach=detach
    )


@torch.inference_mode(False)  # no graph of derivatives is built in that mode: they would be zero
def ggn_vector_product_from_plist(
    loss: Tensor, output: Tensor, plist: Tensors, vlist: Tensors, detach: bool = True
) -> tuple[Tensor, ...]:
    """`G v = J^T H J v`, with `J = d output / d params` and `H = d2 loss / d output2`.

    What the loss takes from the parameters directly (a penalty on weights) is not part of it.

    Args:
        loss: A scalar function of `output`.
        output: The model's output, of any shape.
        plist: The parameters.
        vlist: One tensor per parameter, of its shape.
        detach: Whether the result is cut off the graph. Otherwise it can be differentiated further.

    Returns:
        One tensor per parameter, of its shape; zeros for parameters that the output does not depend on.

    Source: Schraudolph (2002), Fast curvature matrix-vector products; Martens (2010), Deep learning via Hessian-free
    optimization.

    >>> import torch
    >>> w = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> output = w**2
    >>> ggn_vector_product_from_plist((output**2).sum(), output, [w], [torch.ones(2)])  # (2 w) 2 (2 w) v
    (tensor([ 8., 72.]),)
    """
    plist = as_list(plist, "ggn_vector_product", "parameters")
    loss, output = as_list([loss, output], "ggn_vector_product", "loss and output")
    if loss.numel() != 1:
        raise value_error(
            f"ggn_vector_product got a loss of shape {list(loss.shape)}.",
            "only a scalar has a GGN.",
            "pass the loss first, then the output: ggn_vector_product(loss, output, model, v).",
        )
    vlist = as_vectors(vlist, plist, "parameters", "ggn_vector_product")
    gradient = gradient_of(loss, output)
    pushed = jacobian_vector_product(output, plist, vlist, detach=detach)
    curved = hessian_vector_product(loss, output, pushed, grad_params=gradient, detach=detach)
    return transposed_jacobian_vector_product(output, plist, curved, detach=detach)


def gradient_of(loss: Tensor, output: Tensor) -> Tensor:
    """The gradient of the loss with respect to the output, ready to be differentiated; refuses where there is none."""
    if not loss.requires_grad and not output.requires_grad:
        return torch.zeros_like(output)
    gradient = None
    if loss.requires_grad and output.requires_grad:
        with CTX.unseen():
            (gradient,) = torch.autograd.grad(loss, output, create_graph=True, allow_unused=True)
    if gradient is None:
        raise value_error(
            "ggn_vector_product got a loss that autograd does not know as a function of the output.",
            "the product goes from the parameters to the output, and from there to the loss.",
            "pass the very tensor that the loss was computed from, neither detached nor of another forward pass.",
        )
    return gradient
