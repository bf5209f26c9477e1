"""Between one flat vector and a list of tensors in the shapes of parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bpk.jacobians.core.errors import type_error, value_error


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Cut a vector into views in the shapes of the parameters, in their order.

    The inverse of `parameter_list_to_vector`, and of `torch.nn.utils.parameters_to_vector`; the parameters stay as
    they are.

    Args:
        vec: A vector with as many entries as all parameters together.
        parameters: Tensors that give the shapes.

    Raises:
        ValueError: If the length does not fit.

    >>> import torch
    >>> vector_to_parameter_list(torch.arange(5), torch.nn.Linear(2, 1).parameters())
    Traceback (most recent call last):
    ValueError: vector_to_parameter_list got shape [5] for parameters with 3 entries.
      Why: every entry of the vector is one entry of a parameter.
      Do:  pass a vector of shape [3], for the same parameters (all of them, or the trainable ones).
    >>> vector_to_parameter_list(torch.arange(3), torch.nn.Linear(2, 1).parameters())
    [tensor([[0, 1]]), tensor([2])]
    """
    shapes = [p.shape for p in listed("vector_to_parameter_list", parameters)]
    total = sum(shape.numel() for shape in shapes)
    if not isinstance(vec, Tensor):
        raise TypeError(f"vector_to_parameter_list got {type(vec).__name__} as vector: pass torch.as_tensor(vec).")
    if vec.shape != (total,):
        raise value_error(
            f"vector_to_parameter_list got shape {list(vec.shape)} for parameters with {total} entries.",
            "every entry of the vector is one entry of a parameter.",
            f"pass a vector of shape [{total}], for the same parameters (all of them, or the trainable ones).",
        )
    pieces = vec.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def parameter_list_to_vector(tensors: Iterable[Tensor]) -> Tensor:
    """Flatten and concatenate tensors, whatever their memory layout: the inverse of `vector_to_parameter_list`.

    >>> import torch
    >>> parameter_list_to_vector([torch.tensor([[0, 1], [2, 3]]).T, torch.tensor([4])])
    tensor([0, 2, 1, 3, 4])
    """
    parts = [t.reshape(-1) for t in listed("parameter_list_to_vector", tensors)]
    return torch.cat(parts) if parts else torch.zeros(0)


def listed(function: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors as a list; refuses a model in their place, and what is none."""
    found = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    for x in found:
        if not isinstance(x, Tensor) or x is tensors:
            raise type_error(
                f"{function} got {type(x).__name__} in the place of parameters.",
                "it takes several tensors, in an order.",
                "pass a list, or model.parameters().",
            )
    return found
