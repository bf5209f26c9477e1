"""Diagonal of the generalised Gauss-Newton matrix (GGN), exact and sampled, summed and per sample."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Rows, Sums
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension, SumOfSquares


class DiagGGN(SumOfSquares, SquareRootExtension):
    """Common part: `diag(J^T H J) = sum_v (J^T S_v)^2` with `H = S S^T`, the loss Hessian at the model's output."""

    takes = "squares"

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.ggn_diagonals if self.needs_samples else plain.ggn_diagonals.sum(0)


class DiagGGNExact(DiagGGN):
    """Diagonal of the GGN `[*p]`, summed over samples, in the field `diag_ggn_exact`.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Kunstner, Hennig (2020), BackPACK, section 2.3; Schraudolph (2002) for the GGN.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(DiagGGNExact()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.diag_ggn_exact.shape
    torch.Size([3, 4])
    """

    field = "diag_ggn_exact"
    form = Form.BATCH
    over_batches = Sums()
    sums_rows = True
    sums_samples = True
    linear_in_terms = True


class DiagGGNMC(SampledRootExtension, DiagGGN):
    """Monte-Carlo estimate of the diagonal of the GGN `[*p]` in the field `diag_ggn_mc`.

    The loss Hessian is replaced by gradients at targets drawn from the loss's predictive distribution.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).

    Source: Dangel, Kunstner, Hennig (2020), BackPACK, section 2.3.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(DiagGGNMC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.diag_ggn_mc.shape
    torch.Size([3, 4])
    """

    field = "diag_ggn_mc"
    form = Form.BATCH
    over_batches = Sums()
    sums_samples = True
    linear_in_terms = True


class BatchDiagGGNExact(DiagGGN):
    """Diagonal of every sample's GGN `[N, *p]` in the field `diag_ggn_exact_batch`.

    `diag_ggn_exact_batch.sum(0) == diag_ggn_exact`: the loss scaling `1/N` is included.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagGGNExact`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchDiagGGNExact()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.diag_ggn_exact_batch.shape
    torch.Size([8, 3, 4])
    """

    field = "diag_ggn_exact_batch"
    form = Form.SAMPLES
    over_batches = Rows()
    needs_samples = True


class BatchDiagGGNMC(SampledRootExtension, DiagGGN):
    """Monte-Carlo estimate of the diagonal of every sample's GGN `[N, *p]` in `diag_ggn_mc_batch`.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagGGNMC`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchDiagGGNMC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.diag_ggn_mc_batch.shape
    torch.Size([8, 3, 4])
    """

    field = "diag_ggn_mc_batch"
    form = Form.SAMPLES
    over_batches = Rows()
    needs_samples = True


EXTENSIONS = (DiagGGNExact, BatchDiagGGNExact, DiagGGNMC, BatchDiagGGNMC)
