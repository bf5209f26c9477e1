"""Diagonal of the Hessian, summed and per sample."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Rows, Sums
from bpk.extensions.secondorder.base import OfSamples, SumOfSquares
from bpk.sweeps.starts.signed import SignedHessian
from bpk.sweeps.sweep import Sweep


class HessianDiagonal(SumOfSquares, OfSamples):
    """Common part: `diag(H) = sum_k s_k (J^T U_k)^2` over the signed columns of the loss and of every residual."""

    joins_calls = True

    def sweep(self) -> Sweep:
        return SignedHessian(self.subsampling)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.hessian_diagonals if self.needs_samples else plain.hessian_diagonal


class DiagHessian(HessianDiagonal):
    """Diagonal of the Hessian `[*p]`, summed over samples, in the field `diag_h`.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Harmeling, Hennig (2020), modular block-diagonal curvature, for the residuals.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(DiagHessian()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.diag_h.shape
    torch.Size([3, 4])
    """

    field = "diag_h"
    form = Form.BATCH
    over_batches = Sums()
    sums_samples = True


class BatchDiagHessian(HessianDiagonal):
    """Diagonal of every sample's Hessian `[N, *p]` in the field `diag_h_batch`.

    `diag_h_batch.sum(0) == diag_h`: the loss scaling `1/N` is included.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagHessian`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchDiagHessian()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.diag_h_batch.shape
    torch.Size([8, 3, 4])
    """

    field = "diag_h_batch"
    form = Form.SAMPLES
    over_batches = Rows()
    needs_samples = True


EXTENSIONS = (DiagHessian, BatchDiagHessian)
