"""Random projections of a model's individual gradients."""

from __future__ import annotations

from torch import Tensor, nn

from bpk.extensions.firstorder.projected_grad import ProjectedGrad
from bpk.fields.statistics import Uses
from bpk.kernels.passes import OfGradients, run, trained
from bpk.utils.projections import entries, generator

FIELD = "_bpk_projected"


def projected_gradients(
    model: nn.Module, loss: Tensor, k: int | tuple[int, int] = 64, kind: str = "factored", seed: int = 0
) -> Tensor:
    """Random projections `[N, k]` of the individual gradients over all trained parameters, in one backward pass.

    `sum_p s_p * projected_grad_p` with random signs `s_p` `[k]`, so that parameters of one shape, whose matrices are
    the same, do not mix. Inner products estimate those of the whole gradients: `E <z_n, z_m> = <g_n, g_m>`. The same
    model, `k`, `kind` and `seed` give the same matrix, for queries and training samples in turn; `p.grad` stays.

    Args:
        model: The extended model.
        loss: The extended loss of the model's prediction.
        k: How many numbers; for `"factored"` a square number, or a pair `(k_o, k_i)`.
        kind: As for `bpk.extensions.ProjectedGrad`.
        seed: Of the random numbers.

    Source: as for `bpk.extensions.ProjectedGrad`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> bpk.projected_gradients(model, loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3), k=16).shape
    torch.Size([8, 16])
    """
    project = ProjectedGrad(k, kind, seed)
    numbers = {id(p): number for number, p in enumerate(trained(model).values())}

    def value(uses: Uses) -> Tensor:
        found = project.value(uses)
        source = generator("signs", project.seed, numbers[id(uses.parameter)])
        return found * entries("rademacher", found.shape[1], source, found)

    return run(model, loss, OfGradients(FIELD, value))[FIELD]
