"""Top eigenpairs of curvature by a Gram matrix, with slopes and curvatures of each sample along them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bpk.extensions.options import positive
from bpk.fields.statistics import Uses
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.kernels.passes import OfGradients, OfRoot, OfSums, require_loss, run, trained
from bpk.plan.parts import as_parameter, in_parts
from bpk.sweeps.starts.square_root import columns_at

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
    eigenvector to an eigenvector `u` of `V V^T`. Columns go back twice: all `C` for inner products, and `k` sums of
    them with weights `u`; slopes need one more pass of the gradient. `V` is never formed: beside the Gram matrix and
    the eigenvectors, memory is that of the columns of one layer.

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
    k, mc_samples = positive("k", k), positive("mc_samples", mc_samples)
    require_loss(loss)
    params, state, draws = trained(model), RandomState.now(loss.device), mc_samples if of == "ggn_mc" else None
    by_gradients = of == "empirical_fisher"
    gram = Gram()
    run(model, loss, OfGradients(FIELD, gram.add) if by_gradients else OfRoot(FIELD, gram.add, draws), keep=True)
    values, vectors = gram.top(k)
    del gram
    weights = vectors / values.sqrt()[:, None, None]
    parts = {id(p): in_parts(p.detach()) for p in params.values()}
    found = {key: p.new_zeros(len(values), *p.shape) for key, p in parts.items()}
    if not len(values):  # the matrix is zero, as the GGN of a loss that is linear in its prediction
        nothing = values.new_zeros(vectors.shape[2], 0)
        return Eigenpairs(values, {name: as_parameter(found[id(p)], p) for name, p in params.items()}, nothing, nothing)

    def of_gradients(uses: Uses) -> Tensor:
        for vector, sums in zip(weights[:, 0], found[id(uses.parameter)], strict=True):
            sums += uses.summed(vector.to(sums.dtype))
        return values

    def of_columns(uses: Uses) -> Tensor:
        for key in uses.keys:
            found[id(uses.parameter)][columns_at(key)] += uses.sum_of_rows(key)
        return values

    with state.again():  # the same draws
        again = OfGradients(FIELD, of_gradients) if by_gradients else OfSums(FIELD, of_columns, weights, draws)
        run(model, loss, again, keep=True)
    along = OfGradients(FIELD, lambda uses: uses.along(found[id(uses.parameter)])[0])
    slopes = run(model, loss, along, keep=True)[FIELD]
    curvatures = values * vectors.square().sum(1).T
    return Eigenpairs(values, {name: as_parameter(found[id(p)], p) for name, p in params.items()}, slopes, curvatures)


class Gram:
    """Inner products `[V, N, V, N]` of rows, added up over parameters.

    They must be those of the same columns at all parameters: of losses that depend on all of them.
    """

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.total = torch.zeros((), device="cpu")

    def add(self, uses: Uses) -> Tensor:
        """Those of one parameter."""
        if self.keys and uses.keys != self.keys:
            raise UnsupportedLayer(
                f"A parameter {list(uses.param.shape)} is behind other losses than those before.",
                "inner products of columns add up over parameters for the same columns.",
                "use one loss, of predictions side by side, or the eigenpairs of each loss.",
            )
        part = uses.gram()
        self.total = self.total.add_(part.to(self.total.device)) if self.keys else part
        self.keys = uses.keys
        return part.new_zeros(())

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues `[K]`, those that are more than rounding, and eigenvectors `[K, V, N]`."""
        v, n = self.total.shape[:2]
        values, vectors = eigh(self.total.view(v * n, v * n), "the Gram matrix")
        values, vectors = values[-k:].flip(0), vectors[:, -k:].flip(1)
        some = values > v * n * torch.finfo(values.dtype).eps * values[0].abs()
        return values[some], vectors[:, some].T.reshape(int(some.sum()), v, n)
