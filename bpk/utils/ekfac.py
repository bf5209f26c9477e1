"""Eigenvalue-corrected Kronecker factors: products, inverses, and the matrix itself.

`EKFAC` and `EKFLR` save an `Eigenbasis`: orthogonal matrices `U_i`, one for each Kronecker factor, and the second
moments `m` of individual columns in their product `U = kron(*U_i)`. It stands for the block `U diag(m) U^T`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from numbers import Real
from typing import NamedTuple

from torch import Tensor, nn

from bpk.jacobians.core.errors import type_error, value_error
from bpk.utils.damped import eigenvectors, times_in_bases
from bpk.utils.kroneckers import checked, kfacs_to_mat
from bpk.utils.sparse_factors import dense, is_diagonal


class Eigenbasis(NamedTuple):
    """The bases `[U_G, U_A]` (or `[U_G]`) of Kronecker factors, and second moments `[G, A]` (or `[G]`) in them.

    A basis is the identity where a factor is diagonal, as a sparse matrix if it is large.
    """

    bases: list[Tensor]
    moments: Tensor


def checked_block(ekfac: Eigenbasis) -> Eigenbasis:
    """The same, if it is one, with a moment for each pair of directions: others would be broadcast."""
    if not isinstance(ekfac, Eigenbasis) or list(ekfac.moments.shape) != [len(basis) for basis in ekfac.bases]:
        what = type(ekfac).__name__
        if isinstance(ekfac, Eigenbasis):
            what = f"bases of {[len(basis) for basis in ekfac.bases]} with moments {list(ekfac.moments.shape)}"
        raise type_error(
            f"An eigenvalue-corrected block was expected, got {what}.",
            "it has bases of Kronecker factors, and moments in them, one for each of their products.",
            "pass what EKFAC saves, parameter.ekfac, or kfacs_to_ekfac(parameter.kfac).",
        )
    return ekfac


def ekfac_to_mat(ekfac: Eigenbasis) -> Tensor:
    """The matrix `U diag(m) U^T` `[P, P]`, dense.

    >>> import torch
    >>> ekfac_to_mat(Eigenbasis([torch.eye(2), torch.eye(1)], torch.tensor([[3.0], [4.0]])))
    tensor([[3., 0.],
            [0., 4.]])
    """
    ekfac = checked_block(ekfac)
    basis = kfacs_to_mat(ekfac.bases)
    return (basis * ekfac.moments.flatten()) @ basis.T


def ekfac_mat_prod(ekfac: Eigenbasis) -> Callable[[Tensor], Tensor]:
    """The function `mat -> U diag(m) U^T mat`, for `mat` of shape `[P]` or `[P, V]`.

    >>> import torch
    >>> ekfac_mat_prod(Eigenbasis([torch.eye(2)], torch.tensor([3.0, 4.0])))(torch.ones(2))
    tensor([3., 4.])
    """
    kept = checked_block(ekfac)
    return lambda mat: times_in_bases(kept.bases, kept.moments, mat)


def inv_ekfac_mat_prod(ekfac: Eigenbasis, shift: float = 0.0) -> Callable[[Tensor], Tensor]:
    """The function `mat -> U diag(1 / (m + shift)) U^T mat`: the exact inverse of the block plus `shift` (damping).

    Raises:
        ValueError: If a moment plus `shift` is not positive.

    >>> import torch
    >>> inv_ekfac_mat_prod(Eigenbasis([torch.eye(2)], torch.tensor([3.0, 0.0])), shift=1.0)(torch.ones(2))
    tensor([0.2500, 1.0000])
    """
    ekfac = checked_block(ekfac)
    if not isinstance(shift, (Real, Tensor)):
        raise TypeError(f"shift must be a number, got {shift!r}.")
    shifted = ekfac.moments + shift
    if not bool((shifted > 0).all()):
        raise value_error(
            f"Second moments of shape {list(shifted.shape)} plus shift={shift:g} are not all positive.",
            "directions that no sample has moved have the moment zero.",
            "pass a positive shift, for example shift=1e-3.",
        )
    return lambda mat: times_in_bases(ekfac.bases, 1 / shifted, mat)


def kfacs_to_ekfac(factors: Sequence[Tensor]) -> Eigenbasis:
    """The same block as a Kronecker product: its eigenbases, with the products of the eigenvalues as moments.

    The basis of a sparse diagonal factor (of a large table) is the identity, sparse.

    >>> import torch
    >>> kfacs_to_ekfac([torch.tensor([[2.0]]), torch.tensor([[3.0]])]).moments
    tensor([[6.]])
    """
    factors = checked(factors)
    found = [eigenvectors(dense(f) if not is_diagonal(f) else f) for f in factors]
    moments = reduce(lambda left, right: left[..., None] * right, (values for values, _ in found))
    return Eigenbasis([vectors for _, vectors in found], moments)


def bases_of(model: nn.Module, factors: Mapping[str, Sequence[Tensor]]) -> dict[Tensor, list[Tensor]]:
    """The eigenbases of factors by the names of parameters, as `EKFAC(bases=...)` takes them.

    >>> import torch, bpk
    >>> from bpk.extensions import EKFLR, KFLR
    >>> model, loss_fn = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
    >>> batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(2)]
    >>> factors = bpk.accumulate(model, loss_fn, batches, KFLR()).field("kflr")
    >>> result = bpk.accumulate(model, loss_fn, batches, EKFLR(bases=bases_of(model, factors)))
    >>> result["weight"]["ekflr"].moments.shape
    torch.Size([3, 4])
    """
    if not isinstance(factors, Mapping):
        raise TypeError(f"bases_of takes factors by the names of parameters, got {type(factors).__name__}.")
    params = dict(model.named_parameters())
    unknown = sorted(set(factors) - set(params))
    if unknown:
        raise value_error(
            f"Factors are given for {', '.join(unknown)}.",
            f"{type(model).__name__} has no such parameters.",
            "pass factors by the names of model.named_parameters(), such as bpk.accumulate(...).field('kfac').",
        )
    return {params[name]: kfacs_to_ekfac(mine).bases for name, mine in factors.items()}
