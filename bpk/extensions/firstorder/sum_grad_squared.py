"""Sum of squared individual gradients."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.over_batches import Sums
from bpk.fields.statistics import Uses


class SumGradSquared(GradientExtension):
    """Sum over samples of the elementwise squared individual gradients, `[*p]`, in `sum_grad_squared`.

    `sum_grad_squared = (grad_batch ** 2).sum(0)`.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Kunstner, Hennig (2020), BackPACK, section 2.2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(SumGradSquared()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.sum_grad_squared.shape
    torch.Size([3, 4])
    """

    field = "sum_grad_squared"
    form = Form.BATCH
    over_batches = Sums(power=2)

    def value(self, uses: Uses) -> Tensor:
        return uses.squared_sum()

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.gradients.square().sum(0)


EXTENSIONS = (SumGradSquared,)
