"""Diagonals at the output of a layer: what a rule says about squares that need no columns."""

from __future__ import annotations

from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.near_diagonal import NearDiagonal


class Diagonals:
    """The part of a rule that concerns diagonals `[N, *out]` at the output."""

    knows_diagonals: bool = False
    """Whether `squares_of_diagonal` is known, or no parameter asks for it."""

    def squares_of_diagonal(self, call: Call, diag: Tensor, param: str, per_sample: bool = False) -> Tensor:
        """`sum_d h_nd (J_n^T e_d)^2` for `h` `[N, *out]`, without columns: `[*p]`, or `[N, *p]` where `per_sample`."""
        raise TypeError(f"{type(self).__name__} needs columns")

    def diagonal_behind(self, call: Call, diag: Tensor) -> Tensor | None:
        """`J_n^T diag(h_n) J_n` for the Jacobian in the input, if that is a diagonal `[N, *in]` again.

        It is one where no entry of the output depends on two of the input; `None` otherwise.
        """
        return None

    def curvature_behind(self, call: Call, grad_out: Tensor, diag: Tensor | None) -> NearDiagonal | None:
        """`J_n^T diag(h_n) J_n`, for `h` `[N, *out]` (`None`: zero), and the residual, both in the input alone.

        `None` where it is not known to be a diagonal and few columns.
        """
        return None

    def has_disjoint_rows(self, call: Call) -> bool:
        """Whether each entry of a parameter acts on one entry of a sample's output at most.

        Then the diagonal of `J_n^T H_n J_n` needs no more of `H_n` than its diagonal: `squares_of_diagonal`.
        """
        return False
