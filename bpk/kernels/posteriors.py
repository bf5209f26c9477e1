"""Gaussian posteriors over parameters, as what they make of a parameter's rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn

from bpk.fields.statistics import Uses
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.errors import value_error
from bpk.kernels.posterior_arguments import (
    no_tensor,
    require_matrices,
    require_named,
    require_no_less,
    require_numbers,
    require_size,
    variances_of,
)
from bpk.plan.parts import in_parts
from bpk.utils.ekfac import Eigenbasis
from bpk.utils.sparse_factors import dense, diagonal


class Posterior(ABC):
    """A covariance `Sigma` over the parameters that it names; all others are known exactly."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The parameters."""

    @abstractmethod
    def share(self, name: str, uses: Uses) -> Tensor:
        """What a parameter adds to the covariance of the outputs, `[N, C, C]`."""

    def statistics(self, name: str) -> dict[str, Callable[[Uses], Tensor]]:
        """What is added up over parameters, from the rows of each."""
        return {"covariance": partial(self.share, name)}

    def covariance(self, totals: Mapping[str, Tensor]) -> Tensor:
        """`[N, C, C]` from the sums."""
        return totals["covariance"]


@dataclass(frozen=True)
class Diagonal(Posterior):
    """`Sigma = diag(variances)`, by parameter `[*p]`."""

    variances: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        require_named("variances", self.variances)

    @classmethod
    def of(cls, model: nn.Module, field: str, prior_precision: float = 1.0, scale: float = 1.0) -> Diagonal:
        """`1 / (scale h + prior_precision)` with a diagonal `h` in a field of the parameters that have one."""
        return cls({name: 1 / (scale * h + prior_precision) for name, h in fields(model, field).items()})

    @property
    def names(self) -> Sequence[str]:
        return list(self.variances)

    def share(self, name: str, uses: Uses) -> Tensor:
        return uses.sample_gram(variances_of(name, self.variances[name], uses.param))


@dataclass(frozen=True)
class Kronecker(Posterior):
    """`Sigma = (scale kron(G, A) + prior_precision I)^-1` for each parameter, by factors as `KFAC` saves them.

    With `damped_factors` it is `kron(sqrt(scale) G + sqrt(prior_precision) I, sqrt(scale) A + ...)^-1` instead. A
    parameter with one factor, its whole block, has the inverse of that one.
    """

    factors: Mapping[str, Sequence[Tensor]]
    prior_precision: float = 1.0
    scale: float = 1.0
    damped_factors: bool = False

    def __post_init__(self) -> None:
        require_matrices("factors", self.factors)
        require_numbers(prior_precision=self.prior_precision, scale=self.scale)

    @classmethod
    def of(cls, model: nn.Module, field: str, prior_precision: float = 1.0, scale: float = 1.0) -> Kronecker:
        """From a field (`kfac`, `kflr`, `kfra`) of the parameters that have one."""
        return cls(fields(model, field), prior_precision, scale)

    @property
    def names(self) -> Sequence[str]:
        return list(self.factors)

    def share(self, name: str, uses: Uses) -> Tensor:
        """Rows in the eigenbasis of the factors, each entry with its variance."""
        factors = self.factors[name]
        sizes = [len(factor) for factor in factors]
        require_size(name, sizes, prod(sizes) == uses.param.numel(), uses.param)
        if len(factors) == 1 and factors[0].layout is not torch.strided:
            single = diagonal(factors[0]).view_as(uses.param)
            return uses.sample_gram(variances_of(name, 1 / (self.scale * single + self.prior_precision), uses.param))
        values, bases = zip(*(eigh(dense(factor), "a Kronecker factor") for factor in factors), strict=True)
        values = tuple(value.clamp(min=0) for value in values)
        if self.damped_factors and len(factors) == 2:
            root, shift = self.scale**0.5, self.prior_precision**0.5
            return in_eigenbasis(uses, bases, torch.outer(*(root * value + shift for value in values)))
        eigenvalues = values[0] if len(factors) == 1 else torch.outer(*values)
        return in_eigenbasis(uses, bases, self.scale * eigenvalues + self.prior_precision)


@dataclass(frozen=True)
class Eigenbases(Posterior):
    """`Sigma = Q diag(1 / precisions) Q^T` for each parameter, in a basis `Q = Q_1` or `Q = kron(Q_1, Q_2)`.

    `bases` holds orthonormal columns, of one matrix `[P, P]` or of two in the order of the parameter's axes (as `KFAC`
    saves its factors); `precisions` are `[P]` or `[P_1, P_2]`. For factors that have been decomposed once, and for
    precisions that are no product of eigenvalues (`EKFAC`).
    """

    bases: Mapping[str, Sequence[Tensor]]
    precisions: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        require_matrices("bases", self.bases)
        require_named("precisions", self.precisions, self.bases)

    @classmethod
    def of(cls, ekfac: Mapping[str, Eigenbasis], prior_precision: float = 1.0, scale: float = 1.0) -> Eigenbases:
        """`(scale U diag(m) U^T + prior_precision I)^-1`, of what `EKFAC` saves, by the names of parameters."""
        precisions = {name: scale * found.moments + prior_precision for name, found in ekfac.items()}
        return cls({name: found.bases for name, found in ekfac.items()}, precisions)

    @property
    def names(self) -> Sequence[str]:
        return list(self.bases)

    def share(self, name: str, uses: Uses) -> Tensor:
        bases, precisions = self.bases[name], self.precisions[name]
        sizes = [len(basis) for basis in bases]
        fits = prod(sizes) == uses.param.numel() and list(precisions.shape) == sizes
        require_size(name, sizes, fits, uses.param)
        return in_eigenbasis(uses, [dense(basis) for basis in bases], precisions)


def in_eigenbasis(uses: Uses, bases: Sequence[Tensor], precisions: Tensor) -> Tensor:
    """The covariance `[N, C, C]` for the inverse of a matrix with these eigenvectors and eigenvalues."""
    if not bool((precisions > 0).all()):
        raise value_error(
            f"The posterior has a precision that is not positive ({float(precisions.min()):g}).",
            "its inverse is a variance.",
            "pass prior_precision= above zero, and curvature of a GGN that is finite.",
        )
    bases, precisions = [basis.to(uses.param.dtype) for basis in bases], precisions.to(uses.param.dtype)
    if len(bases) == 1:
        directions = bases[0].T / precisions.sqrt()[:, None]
        rows = uses.along(directions.reshape(-1, *uses.param.shape)).transpose(0, 1)
        return rows @ rows.mT
    left, right = (basis.T for basis in bases)
    if uses.input_first:
        left, right, precisions = right, left, precisions.T
    return uses.rotated_gram(left, right, 1 / precisions)


@dataclass(frozen=True)
class LowRank(Posterior):
    """`Sigma = isotropic I + sum_k weights_k u_k u_k^T`, with `u_k` by parameter `[K, *p]`, complex where it is.

    In the place of a number, `isotropic` may hold variances by parameter `[*p]`: `diag(isotropic) + ...`.

    Weights may be negative, as those of `(prior I + sum_k lambda_k e_k e_k^T)^-1` are (`LowRank.of`). A full covariance
    is one of as many columns as it has rows.
    """

    directions: Mapping[str, Tensor]
    weights: Tensor | None = None
    isotropic: float | Mapping[str, Tensor] = 0.0

    def __post_init__(self) -> None:
        require_named("directions", self.directions)
        if isinstance(self.isotropic, Mapping):
            require_named("isotropic", self.isotropic, self.directions)
        else:
            require_numbers(isotropic=self.isotropic)
            require_no_less("isotropic", self.isotropic, "at least 0", 0 <= self.isotropic < inf)
        counts = {name: x.shape[:1] for name, x in self.directions.items()}
        if self.weights is not None:
            if not isinstance(self.weights, Tensor):
                raise TypeError(no_tensor("weights", self.weights))
            counts["weights"] = self.weights.shape
        if len({*counts.values()}) > 1:
            found = ", ".join(f"{[*n]} of {name}" for name, n in counts.items())
            raise value_error(
                f"LowRank(...) got different numbers of directions: {found}.",
                "each direction is one of all parameters together, [K, *p] of each, and has one weight.",
                "pass as many for all parameters (zeros, where one has no part), and weights [K].",
            )

    @classmethod
    def of(cls, vectors: Mapping[str, Tensor], values: Tensor, prior_precision: float = 1.0) -> LowRank:
        """The inverse of `prior_precision I + sum_k values_k e_k e_k^T`, for orthonormal `e_k` (`bpk.eigenpairs`)."""
        require_numbers(prior_precision=prior_precision)
        require_no_less("prior_precision", prior_precision, "above 0", prior_precision > 0)
        return cls(vectors, -values / (values + prior_precision) / prior_precision, 1 / prior_precision)

    @property
    def names(self) -> Sequence[str]:
        return list(self.directions)

    def along(self, name: str, uses: Uses) -> Tensor:
        """Inner products of rows with the directions."""
        directions = in_parts(self.directions[name]).to(uses.param.dtype)
        require_size(name, directions.shape[1:], directions.shape[1:] == uses.param.shape, uses.param)
        return uses.along(directions)

    def share(self, name: str, uses: Uses) -> Tensor:
        if isinstance(self.isotropic, Mapping):
            return uses.sample_gram(variances_of(name, self.isotropic[name], uses.param))
        return self.isotropic * uses.sample_gram()

    def statistics(self, name: str) -> dict[str, Callable[[Uses], Tensor]]:
        return {"along": partial(self.along, name)} | (super().statistics(name) if self.isotropic != 0.0 else {})

    def covariance(self, totals: Mapping[str, Tensor]) -> Tensor:
        rows = totals["along"].transpose(0, 1)  # [N, C, K]
        found = (rows if self.weights is None else rows * self.weights.to(rows.dtype)) @ rows.mT
        return found + totals["covariance"] if "covariance" in totals else found


def fields(model: nn.Module, field: str) -> dict[str, Any]:
    """A field of the parameters that have it, by their names."""
    found = {name: vars(p)[field] for name, p in model.named_parameters() if field in vars(p)}
    if not found:
        raise value_error(
            f"No parameter of {type(model).__name__} has the field '{field}'.",
            "it is saved in a backward pass with the extension of that name.",
            "run one: with bpk.backpack(...): loss.backward().",
        )
    return found
