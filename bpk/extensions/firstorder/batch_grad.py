"""Individual gradients."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.over_batches import Rows
from bpk.fields.statistics import Uses


class BatchGrad(GradientExtension):
    """Individual gradients `[N, *p]` in the field `grad_batch`.

    Row `n` is the gradient of sample `n`'s share of the loss: with `reduction="mean"` that of
    `loss_n / N`, so that `grad_batch.sum(0) == grad`. Rows follow the loss: for `loss_fn(out[mask], y[mask])` there is
    one for each sample that is kept, in the order of the loss.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Kunstner, Hennig (2020), BackPACK, section 2.2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchGrad()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.grad_batch.shape
    torch.Size([8, 3, 4])
    """

    field = "grad_batch"
    linear = True
    form = Form.SAMPLES
    needs_rows = True
    over_batches = Rows()

    def value(self, uses: Uses) -> Tensor:
        return uses.individual()

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.gradients


EXTENSIONS = (BatchGrad,)
