"""Diagonal of `J^T J` for each output of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Sums
from bpk.extensions.secondorder.base import SquareRootExtension
from bpk.fields.statistics import Uses
from bpk.sweeps.starts.square_root import Outputs
from bpk.sweeps.sweep import Sweep


class OutputDiagJTJExact(SquareRootExtension):
    """Diagonal of `J_c^T J_c` `[C, *p]` for each output, summed over samples, in the field `diag_jtj_exact_output`.

    `J_c` `[N, *p]` is the Jacobian of output `c`: `diag_jtj_exact_output.sum(0)` is `diag_jtj_exact`. `C` counts the
    entries of a sample's prediction, in their order. Predictions that are flattened, `[N T, C]`, have `C T`, in the
    order of `[N, C, T]`. Of several losses, the outputs of one follow those of the other, as autograd comes to them.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagJTJExact`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(OutputDiagJTJExact()):
    ...     loss_fn(model(torch.ones(8, 4)), torch.arange(8) % 3).backward()
    >>> model.bias.diag_jtj_exact_output
    tensor([[8., 0., 0.],
            [0., 8., 0.],
            [0., 0., 8.]])
    """

    field = "diag_jtj_exact_output"
    form = Form.OUTPUTS
    combines = True
    over_batches = Sums(power=0)

    def sweep(self) -> Sweep:
        return Outputs(self.mc_samples, self.subsampling)

    def value(self, uses: Uses) -> Tensor:
        each = [(key, k) for key in uses.keys for k in range(uses.columns_of(key))]
        if not each:  # predictions without entries
            return uses.param.new_zeros(0, *uses.param.shape)
        return torch.stack([uses.of_columns(key, slice(k, k + 1)).squared_sum() for key, k in each])

    def combine(self, before: Tensor, value: Tensor) -> Tensor:
        return torch.cat([before, value])

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.output_jacobian_squares


EXTENSIONS = (OutputDiagJTJExact,)
