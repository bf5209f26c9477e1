"""What has products with its derivatives: all that second derivatives need to know of a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt


class Residual(Enum):
    """Structure of a layer's second derivative, contracted with the gradient of its output."""

    ZERO = "zero"
    DIAGONAL = "diagonal"
    GENERAL = "general"


class Differentiable(Protocol):
    """A layer that can be evaluated and multiplied with its derivatives (`bpk.jacobians.rule.Rule` says how)."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def evaluate(self, call: Call, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        """The output of `call` at other inputs and parameters."""

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        """Multiply with the Jacobian."""

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        """Multiply with the transposed Jacobian."""

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        """Structure of the second derivative."""

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """Multiply with the second derivative, contracted with the output's gradient."""

    def residual_rows(self, call: Call, grad_out: Tensor, wrt: Wrt, wrts: Sequence[Wrt]) -> dict[Wrt, Tensor]:
        """Its rows that belong to the entries of `wrt`."""


def add_up(parts: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    return reduce(plus, parts)


def plus(x: Tensor, y: Tensor) -> Tensor:
    """Their sum. Torch has none of sparse matrices in float16 on processors."""
    return (x.float() + y.float()).half() if x.is_sparse and x.dtype == torch.float16 else x + y
