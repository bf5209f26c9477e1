"""Eigendecompositions that do not give up at the first failure."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.numeric import is_finite, wide

JITTERS = (1e-10, 1e-8, 1e-6, 1e-4)
"""What the last attempts add to the diagonal, in units of its mean size."""


def eigh(matrices: Tensor, where: str = "a matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues `[..., D]`, in ascending order, and eigenvectors as columns `[..., D, D]` of symmetric matrices.

    LAPACK's divide and conquer fails now and then where eigenvalues are clustered, above all in single precision. It is
    asked again then: in float64, on the processor, and there with a little added to the diagonal. What it finds comes
    in the type of the matrices, on their device.

    Args:
        matrices: `[..., D, D]`, symmetric.
        where: What messages call them.

    Raises:
        ValueError: If entries are not finite, or no attempt succeeds.

    >>> eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))[0]
    tensor([1., 3.])
    """
    for attempt in attempts(matrices):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError:
            continue
        if is_transformed() or (is_finite(values) and is_finite(vectors)):  # CUDA may give NaN instead
            return values.to(matrices), vectors.to(matrices)
    if not matrices.isfinite().all():
        raise value_error(
            f"{where} of shape {list(matrices.shape)} has entries that are not finite.",
            "a loss or a gradient before it was NaN or infinite.",
            "look for the first batch whose loss is not finite; in training, lower the learning rate or raise the "
            "damping.",
        )
    raise value_error(
        f"No eigendecomposition of {where} of shape {list(matrices.shape)} was found.",
        f"float64 on the processor, with up to {JITTERS[-1]} of its mean size added to the diagonal, failed too.",
        "look at its entries: they may span too many orders of magnitude.",
    )


def attempts(matrices: Tensor) -> Iterator[Tensor]:
    """The matrices in ever more favourable forms; those that are not finite in one only."""
    first = wide(matrices)
    yield first
    if not matrices.isfinite().all():
        return
    if first.dtype is not torch.float64:
        yield first.double()
    double = first.double().cpu()
    if first.device.type != "cpu":
        yield double
    diagonal = double.diagonal(dim1=-2, dim2=-1)
    size = diagonal.abs().mean(-1, keepdim=True)
    for jitter in JITTERS:
        yield double + torch.where(size > 0, jitter * size, jitter).expand_as(diagonal).diag_embed()
