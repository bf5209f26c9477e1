"""Diagonal of `J^T J`, with the Jacobian of the model's outputs, exact and by Hutchinson's estimator."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Sums
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension, SumOfSquares
from bpk.sweeps.starts.square_root import Outputs
from bpk.sweeps.sweep import Sweep


class DiagJTJExact(SumOfSquares, SquareRootExtension):
    """Diagonal of `J^T J` `[*p]`, summed over samples and outputs, in the field `diag_jtj_exact`.

    `J_n` is the Jacobian of what the loss takes for sample `n`; the loss tells where outputs are, and nothing else: its
    Hessian, its divisor and factors in front of it do not count. Of several losses, all predictions do.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Schraudolph (2002) for columns; the GGN of `sum_n ||f_n - t_n||^2 / 2`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(DiagJTJExact()):
    ...     loss_fn(model(torch.ones(8, 4)), torch.arange(8) % 3).backward()
    >>> model.bias.diag_jtj_exact
    tensor([8., 8., 8.])
    """

    field = "diag_jtj_exact"
    form = Form.BATCH
    sums_samples = True
    linear_in_terms = True
    over_batches = Sums(power=0)

    def sweep(self) -> Sweep:
        return Outputs(self.mc_samples, self.subsampling)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.jacobian_squares.sum(0)


class DiagJTJMC(SampledRootExtension, DiagJTJExact):
    """Estimate of the diagonal of `J^T J` `[*p]` by random signs, in the field `diag_jtj_mc`.

    `mean_m sum_n (J_n^T e_nm)^2` with signs `e_nm` drawn for each output of each sample: its mean is the diagonal,
    and it takes `M` columns for any number of outputs.

    Args:
        mc_samples: Number `M` of vectors drawn per datum.
        subsampling: Indices of the samples considered (all by default).

    Source: Hutchinson (1990); Bekas, Kokiopoulou, Saad (2007), for diagonals.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(DiagJTJMC(mc_samples=4)):
    ...     loss_fn(model(torch.ones(8, 4)), torch.arange(8) % 3).backward()
    >>> model.bias.diag_jtj_mc
    tensor([8., 8., 8.])
    """

    field = "diag_jtj_mc"


EXTENSIONS = (DiagJTJExact, DiagJTJMC)
