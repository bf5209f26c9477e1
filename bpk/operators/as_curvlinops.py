"""An operator in curvlinops' interface (`pip install 'bpk[curvlinops]'`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from curvlinops._torch_base import PyTorchLinearOperator  # the base class that its documentation says to derive from
from torch import Tensor


class Multiplies(Protocol):
    """What is needed of an operator of `bpk`."""

    in_shapes: Mapping[str, torch.Size]
    out_shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    device: torch.device

    def product(self, mats: list[Tensor]) -> list[Tensor]:
        """`[K, *in]` each to `[K, *out]` each."""

    def adjoint(self) -> Any:
        """The transposed operator."""


class Wrapped(PyTorchLinearOperator):
    """Products of an operator of `bpk`; curvlinops has the vectors' axis behind, `bpk` in front."""

    def __init__(self, operator: Multiplies) -> None:
        shapes = [[tuple(s) for s in part.values()] for part in (operator.in_shapes, operator.out_shapes)]
        super().__init__(*shapes)
        self.operator = operator

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.operator.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.operator.dtype

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [x.movedim(0, -1) for x in self.operator.product([x.movedim(-1, 0) for x in X])]

    def _adjoint(self) -> PyTorchLinearOperator:
        return self.operator.adjoint().to_curvlinops()


class WrappedSymmetric(Wrapped):
    """One that curvlinops knows to be symmetric."""

    SELF_ADJOINT = True
