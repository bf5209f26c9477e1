"""Matrix square roots of the generalised Gauss-Newton matrix (GGN)."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Rows
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension
from bpk.fields.statistics import Uses


class SqrtGGN(SquareRootExtension):
    """Common part: `V = J^T S` with `GGN = V V^T`."""

    linear = True
    form = Form.ROOT
    needs_rows = True
    combines = stacks = True
    over_batches = Rows(power=0.5, axis=1)

    def value(self, uses: Uses) -> Tensor:
        return uses.all_rows()

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return torch.cat([before, value])

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.ggn


class SqrtGGNExact(SqrtGGN):
    """Square root of the GGN `[C, N, *p]` in the field `sqrt_ggn_exact`: `GGN = sum_cn v_cn v_cn^T`.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Tatzel, Hennig (2022), ViViT, section 2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(SqrtGGNExact()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.sqrt_ggn_exact.shape
    torch.Size([3, 8, 3, 4])
    """

    field = "sqrt_ggn_exact"


class SqrtGGNMC(SampledRootExtension, SqrtGGN):
    """Sampled square root of the GGN `[M, N, *p]` in the field `sqrt_ggn_mc`.

    Args:
        mc_samples: Number `M` of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Tatzel, Hennig (2022), ViViT, section 2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(SqrtGGNMC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.sqrt_ggn_mc.shape
    torch.Size([2, 8, 3, 4])
    """

    field = "sqrt_ggn_mc"


EXTENSIONS = (SqrtGGNExact, SqrtGGNMC)
