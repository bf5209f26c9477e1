"""Inner products of individual gradients."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.fields.statistics import Uses


class GradGram(GradientExtension):
    """Inner products `[N, N]` of the individual gradients, per parameter, in the field `grad_gram`.

    `grad_gram[n, m] = <grad_batch[n], grad_batch[m]>`, so that the sum over parameters is that of the model's
    gradients (`bpk.Summed("grad_gram")`). Its diagonal is `batch_l2`, and it has the spectrum of `sum_n g_n g_n^T`.
    Individual gradients are not formed where they are sums of few outer products, or only a part of each at a time.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Tatzel, Hennig (2022), ViViT, section 3, for the Gram matrix in place of the curvature.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(GradGram()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.grad_gram.shape
    torch.Size([8, 8])
    """

    field = "grad_gram"
    power = 2
    form = Form.GRAM
    over_batches = (
        "its entries belong to pairs of samples, and samples of different batches are in no pass together\n"
        "use ProjectedGrad, whose rows have the same inner products on average, BatchGrad with per_sample=folder, or "
        "bpk.operators.EmpiricalFisher, whose eigenvalues are proportional."
    )

    def value(self, uses: Uses) -> Tensor:
        return uses.gram(aligned=True)[0]

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.gradients @ plain.gradients.T

    def magnitude(self, plain: PlainAutograd) -> Tensor:
        """The norms: gradients of different samples may be orthogonal but for rounding."""
        return plain.norms


EXTENSIONS = (GradGram,)
