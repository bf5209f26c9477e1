"""Gram matrix of the square root of the generalised Gauss-Newton matrix (GGN), exact and sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension
from bpk.fields.statistics import Uses


class GGNGram(SquareRootExtension):
    """Inner products `[C N, C N]` of the columns of the GGN's square root, in the field `ggn_gram`.

    With `V = sqrt_ggn_exact.flatten(0, 1).flatten(1)` `[C N, P]` it is `V V^T`, without `V`: it has the non-zero
    spectrum of the parameter's GGN block `V^T V`. Row `c N + n` belongs to column `c` of sample `n`. The sum over
    parameters (`bpk.Summed("ggn_gram")`) has the spectrum of the whole model's GGN; `bpk.eigenpairs` takes its
    eigenvectors back to the parameters.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Tatzel, Hennig (2022), ViViT, section 3.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(GGNGram()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.ggn_gram.shape
    torch.Size([24, 24])
    """

    field = "ggn_gram"
    power = 1
    form = Form.ROOT_GRAM
    over_batches = (
        "its entries belong to pairs of samples, and samples of different batches are in no pass together\n"
        "use bpk.operators.GGN, which has the same spectrum, with any solver for eigenvalues, or SqrtGGNExact with "
        "per_sample=folder."
    )

    def value(self, uses: Uses) -> Tensor:
        return uses.gram().flatten(2).flatten(0, 1)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return torch.einsum("nef,mef->nm", plain.ggn, plain.ggn)


class GGNGramMC(SampledRootExtension, GGNGram):
    """The same `[M N, M N]` for a Monte-Carlo estimate of the GGN, in the field `ggn_gram_mc`.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).

    Source: as for `GGNGram`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(GGNGramMC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.ggn_gram_mc.shape
    torch.Size([16, 16])
    """

    field = "ggn_gram_mc"


EXTENSIONS = (GGNGram, GGNGramMC)
