"""Pick samples from a batch."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr

import torch
from torch import Tensor

from bpk.jacobians.core.errors import explain, type_error


def subsample(tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | None = None) -> Tensor:
    """The entries `subsampling` of a tensor along its batch axis `dim`; the tensor itself for `None`.

    >>> import torch
    >>> subsample(torch.arange(6).reshape(2, 3), dim=1, subsampling=[2, 0])
    tensor([[2, 0],
            [5, 3]])
    """
    if subsampling is None:
        return tensor
    try:
        index = torch.as_tensor(subsampling, device=tensor.device)
    except (TypeError, ValueError, RuntimeError):
        index = tensor.new_ones(1, dtype=torch.bool)
    if index.numel() and (index.dtype is torch.bool or index.is_floating_point()):
        raise type_error(
            f"subsample got {repr(subsampling)} as indices.",
            "each index names one sample of the batch; a mask, or a share of the batch, is none.",
            "pass whole numbers from 0 to N - 1; of a mask, mask.nonzero().flatten().",
        )
    index = index.long()
    size = tensor.shape[dim]
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise IndexError(
            explain(
                f"subsample got indices {index.tolist()} for an axis of {size} samples.",
                "each index names one sample of the batch.",
                "pass indices from 0 to N - 1.",
            )
        )
    return tensor.index_select(dim, index)
