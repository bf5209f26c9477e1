"""Posteriors of laplace-torch as those of `bpk.kernels`."""

from __future__ import annotations

import laplace
import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.kernels.posteriors import Diagonal, Eigenbases, LowRank, Posterior


def posterior_of(fitted: laplace.ParametricLaplace) -> Posterior:
    """The posterior of a fitted approximation of laplace-torch, by the names of `fitted.model.named_parameters()`.

    `Diagonal` of a diagonal one, `Eigenbases` of a Kronecker-factored one (with one prior precision or one for each
    parameter), `LowRank` of a low-rank one; of all weights or of the last layer. For
    `bpk.predictive_covariance(fitted.model, x, posterior_of(fitted))`.
    """
    ours = {id(p) for p in fitted.backend.params}
    params = {name: p for name, p in fitted.model.named_parameters() if id(p) in ours}

    def by_name(columns: Tensor) -> dict[str, Tensor]:
        """`[..., P]` as one tensor `[..., *p]` for each parameter."""
        parts = columns.split([p.numel() for p in params.values()], -1)
        pairs = zip(params.items(), parts, strict=True)
        return {name: part.reshape((*part.shape[:-1], *p.shape)) for (name, p), part in pairs}

    if isinstance(fitted, laplace.SubnetLaplace) or fitted.n_params != sum(p.numel() for p in params.values()):
        pass
    elif isinstance(fitted, laplace.DiagLaplace):
        return Diagonal(by_name(fitted.posterior_variance.detach()))
    elif isinstance(fitted, laplace.KronLaplace):
        precision = fitted.posterior_precision
        triples = zip(params, precision.eigenvalues, precision.deltas.detach().expand(len(params)), strict=True)
        precisions = {
            name: (values[0] if len(values) == 1 else torch.outer(*values)) + delta for name, values, delta in triples
        }
        return Eigenbases(dict(zip(params, precision.eigenvectors, strict=True)), precisions)
    elif isinstance(fitted, laplace.LowRankLaplace):
        # (U diag(l) U^T + D)^-1 = D^-1 - V K^-1 V^T with V = D^-1 U, K = diag(1 / l) + U^T V
        root = torch.linalg.cholesky(fitted.Kinv)
        directions = (fitted.V @ root).T.detach()
        return LowRank(
            by_name(directions), -torch.ones_like(directions[:, 0]), by_name(1 / fitted.prior_precision_diag)
        )
    raise UnsupportedLayer(
        f"{type(fitted).__name__} is no posterior of bpk.kernels.",
        "these are diagonal, Kronecker-factored or of low rank, over whole parameters.",
        "use hessian_structure='diag', 'kron' or 'lowrank', and subset_of_weights='all' or 'last_layer'.",
    )
