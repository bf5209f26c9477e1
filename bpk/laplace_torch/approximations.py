"""Approximations of laplace-torch whose linearised predictions need no Jacobians."""

from __future__ import annotations

from typing import Any

import laplace
import torch
from laplace import HessianStructure, SubsetOfWeights
from laplace.curvature import CurvatureInterface, CurvlinopsGGN
from torch import Tensor, nn

from bpk.kernels.predictive import predicted
from bpk.laplace_torch.backends import GGN, no_factors
from bpk.laplace_torch.posterior import posterior_of


def given_as_it_is(model: nn.Module, x: Any) -> Any:
    """How laplace-torch calls a model: also with a mapping, which is one argument."""
    return model(x)


class WithoutJacobians(laplace.ParametricLaplace):
    """The covariance of outputs by `bpk.predictive_covariance`: `[N, C, P]` is never formed.

    Joint predictions of several inputs, and predictions that are differentiated (`enable_backprop`), stay with
    laplace-torch, which asks the backend for Jacobians.
    """

    def __init__(
        self, model: nn.Module, likelihood: str, *, backend: type[CurvatureInterface] = GGN, **options: Any
    ) -> None:
        super().__init__(model, likelihood, backend=backend, **options)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        if joint or self.enable_backprop:
            return super()._glm_predictive_distribution(X, joint, diagonal_output)
        with torch.enable_grad():
            f, covariance = predicted(
                self.model, X, posterior_of(self), lambda model, x: model(x)
            )  # `X` may be a mapping
        return f, covariance.diagonal(dim1=1, dim2=2) if diagonal_output else covariance


# laplace.Laplace looks classes up by their `_key`: these have keys of their own, so that it goes on finding its own
class DiagLaplace(WithoutJacobians, laplace.DiagLaplace):
    """`laplace.DiagLaplace`."""

    _key = ("all", "diag", "bpk")


class KronLaplace(WithoutJacobians, laplace.KronLaplace):
    """`laplace.KronLaplace`."""

    _key = ("all", "kron", "bpk")

    def _init_H(self) -> None:
        self.H = no_factors({name: p for name, p in self.model.named_parameters() if p.requires_grad})


class LowRankLaplace(WithoutJacobians, laplace.LowRankLaplace):
    """`laplace.LowRankLaplace`; eigenpairs of the GGN, `backend_kwargs={"rank": 10}`."""

    _key = ("all", "lowrank", "bpk")

    def __init__(
        self, model: nn.Module, likelihood: str, *, backend: type[CurvatureInterface] = GGN, **options: Any
    ) -> None:
        # that of laplace.LowRankLaplace asks for a package which only its own backend needs
        laplace.ParametricLaplace.__init__(self, model, likelihood, backend=backend, **options)


class DiagLLLaplace(WithoutJacobians, laplace.DiagLLLaplace):
    """`laplace.DiagLLLaplace`, of the last layer."""

    _key = ("last_layer", "diag", "bpk")


class KronLLLaplace(WithoutJacobians, laplace.KronLLLaplace):
    """`laplace.KronLLLaplace`, of the last layer."""

    _key = ("last_layer", "kron", "bpk")

    def _init_H(self) -> None:
        self.H = no_factors(dict(self.model.last_layer.named_parameters()))


class Functional(laplace.FunctionalLaplace):
    """A Gaussian process, whose kernel laplace-torch makes of Jacobians `[N, C, P]`; it takes its own backends only."""

    def __init__(
        self, model: nn.Module, likelihood: str, *, backend: type[CurvatureInterface] = GGN, **options: Any
    ) -> None:
        super().__init__(model, likelihood, backend=CurvlinopsGGN, **options)
        self._backend_cls = backend


class FunctionalLaplace(Functional):
    """`laplace.FunctionalLaplace`."""

    _key = ("all", "gp", "bpk")


class FunctionalLLLaplace(Functional, laplace.FunctionalLLLaplace):
    """`laplace.FunctionalLLLaplace`, of the last layer."""

    _key = ("last_layer", "gp", "bpk")


OURS = {
    kind._key[:2]: kind
    for kind in (
        DiagLaplace,
        KronLaplace,
        LowRankLaplace,
        DiagLLLaplace,
        KronLLLaplace,
        FunctionalLaplace,
        FunctionalLLLaplace,
    )
}


def Laplace(
    model: nn.Module,
    likelihood: str,
    subset_of_weights: str = "last_layer",
    hessian_structure: str = "kron",
    backend: type[CurvatureInterface] = GGN,
    **options: Any,
) -> laplace.BaseLaplace:
    """`laplace.Laplace` on `bpk`: its arguments, its methods, curvature by rules, predictions without Jacobians.

    Args:
        model: Any model; it is extended.
        likelihood: `"classification"` or `"regression"`.
        subset_of_weights: `"all"`, `"last_layer"` or `"subnetwork"`.
        hessian_structure: `"diag"`, `"kron"`, `"lowrank"`, `"full"`, `"gp"`. The last two, and those of subnetworks,
            predict by laplace-torch's own products with Jacobians; these come from the backend, in one backward pass.
        backend: `bpk.laplace_torch.GGN` or `EF` (or one of laplace-torch's).
        options: What `laplace.Laplace` takes besides.

    Source: Daxberger et al. (2021), Laplace Redux, for the interface; Immer, Korzepa, Bauer (2021), for predictions.
    """
    ours = OURS.get((SubsetOfWeights(subset_of_weights).value, HessianStructure(hessian_structure).value))
    if ours is None:
        return laplace.Laplace(model, likelihood, subset_of_weights, hessian_structure, backend=backend, **options)
    return ours(model, likelihood, backend=backend, **options)
