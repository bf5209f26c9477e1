"""Weight normalisation, written out: torch's own gradient takes norms for constants, so that Hessians are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def written_out(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / |v|`."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    return g * v / (torch.linalg.vector_norm(v, dim=axes, keepdim=True) if axes else v.abs())


class WrittenOut(TorchFunctionMode):
    """Inside, the formula stands for torch's function."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (written_out if func is torch._weight_norm else func)(*args, **(kwargs or {}))
