"""Squared norms of individual gradients."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.over_batches import Rows
from bpk.fields.statistics import Uses


class BatchL2Grad(GradientExtension):
    """Squared L2 norms `[N]` of the individual gradients, per parameter, in the field `batch_l2`.

    `batch_l2[n] = ||grad_batch[n]||^2`; individual gradients are not formed where their norm is cheaper.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Goodfellow (2015), arXiv:1510.01799, for layers with one position; Rochette et al. (2019) beyond.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchL2Grad()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.batch_l2.shape
    torch.Size([8])
    """

    field = "batch_l2"
    form = Form.NUMBERS
    over_batches = Rows(power=2)

    def value(self, uses: Uses) -> Tensor:
        return uses.norm_squared()

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.norms


EXTENSIONS = (BatchL2Grad,)
