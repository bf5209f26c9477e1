"""The covariance of a linearised model's outputs under a Gaussian posterior."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bpk.extending import check_module
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import type_error, value_error
from bpk.kernels.batch import Batch, Inputs, OutputsOf
from bpk.kernels.passes import OfRoot, of_outputs
from bpk.kernels.posteriors import Posterior


def predictive_covariance(
    model: nn.Module, x: Inputs, posterior: Posterior, forward: OutputsOf | None = None
) -> Tensor:
    """`J_n Sigma J_n^T` `[N, C, C]`, the covariance of the outputs of the model linearised in its parameters.

    The columns of all outputs go back once, as far as the posterior's parameters. At each of them the posterior's
    factors meet the layer's inputs and columns: for `kron(G, A)^-1` it is `(a^T A^-1 a) M^T G^-1 M` at one position.
    Jacobians `[N, C, P]` are not formed.

    Args:
        model: The model, whose samples must not mix; it is extended if it is not. Outputs `[N, *c]`, `C` per sample.
        x: A batch `[N, ...]`, a tuple of the arguments of the model's `forward`, or what the argument `forward` takes.
        posterior: `bpk.kernels.Diagonal`, `Kronecker` or `LowRank`. Of the last layer: one that names its parameters.
        forward: `forward(model, x)` gives the outputs, one tensor, of models that return others or take no tensors.

    Source: Immer, Korzepa, Bauer (2021), Improving predictions of Bayesian neural nets via local linearization.

    >>> import torch, bpk
    >>> from bpk.kernels import Diagonal
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    >>> last_layer = Diagonal({"2.weight": torch.ones(3, 5), "2.bias": torch.ones(3)})
    >>> bpk.predictive_covariance(model, torch.randn(6, 4), last_layer).shape
    torch.Size([6, 3, 3])
    """
    return predicted(model, x, posterior, forward)[1]


@torch.inference_mode(False)  # the Jacobian needs a graph
def predicted(
    model: nn.Module, x: Inputs, posterior: Posterior, forward: OutputsOf | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs of a model, without their graph, and `predictive_covariance`."""
    if not isinstance(posterior, Posterior):
        raise type_error(
            f"The posterior is an object of type {type(posterior).__name__}.",
            "how a covariance is multiplied depends on its form.",
            "pass bpk.kernels.Diagonal({name: variances}), Kronecker or LowRank.",
        )
    check_module(model)
    batch = Batch.of("predictive_covariance", "x", x, forward)
    params = dict(model.named_parameters())
    unknown = sorted(set(posterior.names) - set(params))
    if unknown or not posterior.names:
        raise value_error(
            f"The posterior names {unknown or 'no parameter'}.",
            f"the parameters of {type(model).__name__} are {', '.join(params)}.",
            "use the names of model.named_parameters().",
        )
    named = {id(params[name]): posterior.statistics(name) for name in posterior.names}
    kinds = list(next(iter(named.values())))

    def statistic(kind: str) -> OfRoot:
        def value(uses: Uses) -> Tensor:
            return named[id(uses.parameter)][kind](uses)

        return OfRoot(f"_bpk_{kind}", value)

    with only(params, posterior.names):
        outputs = batch.outputs(model)
        totals = of_outputs(model, outputs, *map(statistic, kinds))
    with torch.no_grad():
        return outputs.detach(), posterior.covariance({kind: totals[f"_bpk_{kind}"] for kind in kinds})


@contextmanager
def only(params: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[None]:
    """Inside, only these parameters require gradients."""
    before = {name: p.requires_grad for name, p in params.items()}
    try:
        for name, p in params.items():
            p.requires_grad_(name in names)
        yield
    finally:
        for name, p in params.items():
            p.requires_grad_(before[name])
