"""Top eigenpairs of curvature by a Gram matrix, with slopes and curvatures of each sample along them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bpk.fields.statistics import Uses
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.random_state import RandomState
from bpk.kernels.passes import Compute, OfGradients, OfRoot, run, trained

OF = ("ggn", "ggn_mc", "empirical_fisher")
FIELD = "_bpk_eigenpairs"


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenpairs of a matrix `B = sum_n B_n` over all trained parameters, the largest first.

    Samples carry the loss's scaling (`1/N` of a mean), so that slopes and curvatures add up over samples: to the slope
    of the loss, and to the eigenvalue.
    """

    values: Tensor
    """`[K]`"""
    vectors: Mapping[str, Tensor]
    """By parameter `[K, *p]`: eigenvectors of norm one over all parameters."""
    slopes: Tensor
    """`[N, K]`: `<g_n, e_k>`, the first derivative of each sample's loss along an eigenvector."""
    curvatures: Tensor
    """`[N, K]`: `e_k^T B_n e_k`, the second derivative (of the GGN) along it."""


def eigenpairs(model: nn.Module, loss: Tensor, k: int = 10, of: str = "ggn", mc_samples: int = 1) -> Eigenpairs:
    """The top `k` eigenpairs of the GGN, or the Fisher, with every sample's slope and curvature along them.

    With the square root `V` `[C N, P]` of the GGN, `V V^T` has its spectrum, and `V^T u / sqrt(lambda)` is the
    eigenvector to an eigenvector `u` of `V V^T`. Columns go back twice: for inner products, and in sums with weights
    `u`; slopes need one more pass of the gradient. `V` is never formed.

    Args:
        model: The extended model.
        loss: The extended loss of the model's prediction. Its graph is kept; `p.grad` stays as it is.
        k: How many, at most; eigenvalues that are rounding are left out.
        of: `"ggn"`; `"ggn_mc"`, with gradients at targets drawn from the prediction: an estimate of the Fisher, which
            is the GGN for likelihoods of the exponential family; `"empirical_fisher"`, `sum_n g_n g_n^T` of the
            samples' shares of the loss as they are (times `N`, for a mean, it is the mean over samples).
        mc_samples: Draws per sample for `"ggn_mc"`.

    Source: Dangel, Tatzel, Hennig (2022), ViViT, sections 3.1 and 3.2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> pairs = bpk.eigenpairs(model, loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3), k=5)
    >>> pairs.values.shape, pairs.vectors["weight"].shape, pairs.slopes.shape
    (torch.Size([5]), torch.Size([5, 3, 4]), torch.Size([8, 5]))
    >>> torch.allclose(pairs.curvatures.sum(0), pairs.values)
    True
    """
    if of not in OF:
        raise ValueError(f"of must be one of {OF}, got {of!r}.")
    params, state = trained(model), RandomState.now(loss.device)

    def rows(compute: Compute) -> OfGradients | OfRoot:
        if of == "empirical_fisher":
            return OfGradients(FIELD, compute)
        return OfRoot(FIELD, compute, mc_samples if of == "ggn_mc" else None)

    gram = run(model, loss, rows(Uses.gram), keep=True)[FIELD]
    v, n = gram.shape[:2]
    values, vectors = eigh(gram.view(v * n, v * n), "the Gram matrix")
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    some = values > v * n * torch.finfo(values.dtype).eps * values[0].abs()
    values, vectors = values[some], vectors[:, some].T.reshape(-1, v, n)
    found: dict[int, Tensor] = {}

    def keep(uses: Uses) -> Tensor:
        found[id(uses.param)] = uses.sum_of_rows(vectors / values.sqrt()[:, None, None])
        return values

    with state.again():  # the same draws
        run(model, loss, rows(keep), keep=True)
    for p in params.values():  # those that the loss does not curve in
        found.setdefault(id(p), p.new_zeros(len(values), *p.shape))
    slopes = run(model, loss, OfGradients(FIELD, lambda uses: uses.along(found[id(uses.param)])[0]), keep=True)[FIELD]
    curvatures = values * vectors.square().sum(1).T
    return Eigenpairs(values, {name: found[id(p)] for name, p in params.items()}, slopes, curvatures)
