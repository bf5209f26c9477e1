"""Inverses of Kronecker products plus a multiple of the identity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.numeric import wide
from bpk.utils.kroneckers import apply_kfac_mat_prod, checked
from bpk.utils.sparse_factors import diagonal, sparse_diagonal


class DampedInverse:
    """The exact inverse `(kron(*factors) + damping I)^-1`, by the factors' eigenvectors.

    With `F_i = Q_i diag(l_i) Q_i^T` it is `Q diag(1 / (l_1 l_2 ... + damping)) Q^T`, `Q = kron(Q_1, Q_2, ...)`.
    Negative eigenvalues are rounding of positive semi-definite factors, and count as zero. A sparse factor must be
    diagonal.

    Args:
        factors: Symmetric, positive semi-definite matrices.
        damping: A positive number.
        where: What messages call the factors.

    >>> import torch
    >>> DampedInverse([torch.diag(torch.tensor([1.0, 3.0])), 2 * torch.eye(1)], damping=2.0)(torch.ones(2))
    tensor([0.2500, 0.1250])
    """

    def __init__(self, factors: Sequence[Tensor], damping: float, where: str = "a Kronecker factor") -> None:
        self._set([eigenvectors(factor, where) for factor in checked(factors)], damping)

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[Tensor, Tensor]], damping: float) -> DampedInverse:
        """The inverse, from eigenvalues and eigenvectors of each factor."""
        made = cls.__new__(cls)
        made._set(pairs, damping)
        return made

    def _set(self, pairs: Sequence[tuple[Tensor, Tensor]], damping: float) -> None:
        positive_damping(damping)
        self.bases = [basis for _, basis in pairs]
        self.scale = 1 / (reduce(torch.kron, [values.clamp(min=0) for values, _ in pairs]) + damping)

    @classmethod
    def of_state(cls, state: dict[str, list[Tensor]], device: torch.device) -> DampedInverse:
        """The inverse whose `state_dict()` was saved."""
        made = cls.__new__(cls)
        made.bases, made.scale = [basis.to(device) for basis in state["bases"]], state["scale"][0].to(device)
        return made

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Its tensors."""
        return {"bases": list(self.bases), "scale": [self.scale]}

    def to(self, like: Tensor) -> None:
        """Bring its tensors to the device and the precision of another one."""
        self.bases, self.scale = [basis.to(like) for basis in self.bases], self.scale.to(like)

    def __call__(self, mat: Tensor) -> Tensor:
        """The inverse times a vector `[P]`, or columns `[P, V]`."""
        return times_in_bases([basis.to(mat.dtype) for basis in self.bases], self.scale.to(mat.dtype), mat)


def times_in_bases(bases: Sequence[Tensor], values: Tensor, mat: Tensor) -> Tensor:
    """`U diag(values) U^T mat` with `U = kron(*bases)`; a sparse basis is the identity."""
    turned = apply_kfac_mat_prod([basis.T if basis.layout is torch.strided else basis for basis in bases], mat)
    return apply_kfac_mat_prod(bases, turned * values.reshape(-1, *[1] * (mat.dim() - 1)))


def eigenvectors(factor: Tensor, where: str = "a Kronecker factor") -> tuple[Tensor, Tensor]:
    """Eigenvalues, and eigenvectors as columns; of a sparse diagonal matrix the sparse identity."""
    if factor.layout is torch.strided:
        values, vectors = eigh((wide(factor) + wide(factor).T) / 2, where)
        return values.to(factor.dtype), vectors.to(factor.dtype).contiguous()
    values = diagonal(factor)
    return values, sparse_diagonal(torch.ones_like(values))


def positive_damping(damping: Any) -> float:
    """A damping that curvature can be inverted with; anything else is refused."""
    if not isinstance(damping, (Real, Tensor)) or not float(damping) > 0:
        raise value_error(
            f"damping must be positive, got {damping!r}.",
            "curvature has eigenvalues that are zero (Kronecker factors, where there are fewer samples than rows).",
            "pass a positive number, such as damping=1e-3 (or a function of the step that returns one).",
        )
    return float(damping)


def split_damping(factors: Sequence[Tensor], damping: float) -> list[float]:
    """A shift for each factor, in proportion to its mean eigenvalue, whose product is the damping.

    Source: Martens, Grosse (2015), section 6.3 (with the trace norm).

    >>> import torch
    >>> split_damping([4 * torch.eye(2), torch.eye(3)], 0.01)
    [0.2, 0.05]
    """
    means = [float((f.diagonal() if f.layout is torch.strided else diagonal(f)).mean()) for f in checked(factors)]
    root = damping ** (1 / len(means))
    if min(means) <= 0:
        return [root] * len(means)
    middle = torch.tensor(means, dtype=torch.float64, device="cpu").log().mean().exp().item()
    return [root * mean / middle for mean in means]
