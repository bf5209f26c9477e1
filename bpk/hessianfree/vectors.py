"""What the matrix-free products share: arguments as lists of tensors, checks, and derivatives that may be zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer, type_error, value_error
from bpk.jacobians.core.numeric import tracked
from bpk.jacobians.second_order.graph import differentiable_again
from bpk.jacobians.second_order.once import refused_as
from bpk.recording.context.state import CTX

Tensors = Tensor | Iterable[Tensor]
"""One tensor, or several."""


def as_list(tensors: Tensors, where: str = "A product", what: str = "vectors") -> list[Tensor]:
    """One tensor as a list of one; several as a list. Refuses what are none."""
    given = [tensors] if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable) else list(tensors)
    for x in given:
        if not isinstance(x, Tensor):
            of = f"{type(tensors).__name__} with " if x is not tensors else ""
            raise type_error(
                f"{where} got {of}{type(x).__name__} as {what}.",
                "derivatives are those of tensors, with respect to tensors.",
                "pass one tensor, or a list of several, such as list(model.parameters()).",
            )
    return given


def as_vectors(given: Tensors, like: Sequence[Tensor], what: str, where: str) -> list[Tensor]:
    """`given` as a list that matches `like` in number and shapes, or a refusal that says what does not match."""
    vectors = as_list(given, where, "vectors")
    if len(vectors) != len(like):
        raise value_error(
            f"{where} got {len(vectors)} vectors for {len(like)} {what}.",
            "a vector lists one tensor for each of them, in the same order.",
            "pass [torch.randn_like(x) for x in ...], or split a flat vector with "
            "bpk.utils.convert_parameters.vector_to_parameter_list.",
        )
    for index, (vector, tensor) in enumerate(zip(vectors, like, strict=True)):
        if vector.shape != tensor.shape:
            raise value_error(
                f"{where} got a vector of shape {list(vector.shape)} for number {index} of the {what}, which has "
                f"shape {list(tensor.shape)}.",
                "the product is linear in the vector, entry by entry.",
                "reshape the vector; a flat one is split by bpk.utils.convert_parameters.vector_to_parameter_list.",
            )
    return list(map(tracked, vectors))


def twice(reason: str) -> UnsupportedLayer:
    """The refusal of a graph with a function that torch differentiates once only."""
    return UnsupportedLayer(
        "A product cannot pass a function of this graph.",
        f"it differentiates a derivative, and torch has none of that: {reason}",
        "run the forward pass with functions that have one, attention within `with torch.nn.attention.sdpa_kernel("
        "torch.nn.attention.SDPBackend.MATH):`, or use bpk.operators.GGN or Hessian, which see to it. "
        "Change nothing in place that the graph holds.",
    )


def derivatives(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    create_graph: bool,
    retain_graph: bool = True,
) -> tuple[Tensor, ...]:
    """`(d ys / d xs)^T vectors`, cut off any graph unless one is created; zeros where nothing depends on an `x`."""
    live = [(y, v) for y, v in zip(ys, vectors, strict=True) if y.requires_grad]
    wanted = [k for k, x in enumerate(xs) if x.requires_grad]
    found: dict[int, Tensor | None] = {}
    if live and wanted:
        with CTX.unseen(), refused_as(twice), differentiable_again([y for y, _ in live] if create_graph else []):
            grads = torch.autograd.grad(
                [y for y, _ in live],
                [xs[k] for k in wanted],
                grad_outputs=[v for _, v in live],
                create_graph=create_graph,
                retain_graph=retain_graph or create_graph,
                allow_unused=True,
            )
        found = dict(zip(wanted, (g if create_graph or g is None else g.detach() for g in grads), strict=True))
    return tuple(torch.zeros_like(x) if (g := found.get(k)) is None else g for k, x in enumerate(xs))
