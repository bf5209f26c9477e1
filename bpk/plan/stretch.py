"""The rule of a stretch of plain autograd between two recorded calls: autograd itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.rows_through import RowsThrough, materialised
from bpk.jacobians.rule import Rule
from bpk.plan.graph import Source
from bpk.plan.samples.rows import of_samples, over_batch
from bpk.plan.squared_rows import Of
from bpk.plan.stretch_call import StretchCall


def whole_batch(call: Call, mat: Tensor) -> tuple[Source, Tensor]:
    """A stretch, and columns at its end as those of the whole batch."""
    assert isinstance(call, StretchCall)
    return call.source, over_batch(mat, call.samples, call.output.shape[0])


class PlainAutograd(Rule):
    """Products by autograd's own graph, which is alive during the backward pass only."""

    finds_all_rows = True

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        raise TypeError("a stretch is multiplied from the left only; `LinearisedStretch` goes both ways")

    def jac_t_mat_prods(self, call: Call, mat: Tensor, *others: tuple[Call, Tensor]) -> dict[int, Tensor]:
        """Multiply with the transposed Jacobians of all inputs that the output depends on.

        What comes of `others` beside it (see `Source.pull`) is added.
        """
        (source, full), *rest = [whole_batch(*each) for each in ((call, mat), *others)]
        assert isinstance(call, StretchCall)
        return {k: of_samples(part, call.samples) for k, part in source.pull(full, *rest).items()}

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        assert isinstance(call, StretchCall) and isinstance(wrt, str)
        together = sum_batch and call.samples is None
        rows = materialised(call.of_parameters(mat, together=together)[int(wrt)])
        rows = rows.to(torch.promote_types(rows.dtype, call.params[wrt].dtype))  # functions may be in a shorter format
        return rows.sum(1) if sum_batch and not together else rows

    def rows_through(self, call: Call, mat: Tensor, param: str) -> RowsThrough | None:
        assert isinstance(call, StretchCall)
        rows = call.of_parameters(mat, together=False)[int(param)]
        return rows if isinstance(rows, RowsThrough) else None

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        if torch.is_grad_enabled():
            return super().squared_sum(call, mat, param, weights, per_sample)
        assert isinstance(call, StretchCall)
        return call.squares(param, [mat], weights, Of.SAMPLES if per_sample else Of.BATCH)

    def squared_sum_of_blocks(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        assert isinstance(call, StretchCall)
        return call.squares(param, mats, weights, Of.SAMPLES if per_sample else Of.BATCH)

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        if torch.is_grad_enabled():
            return super().norm_squared(call, grad_out, param)
        assert isinstance(call, StretchCall)
        return call.squares(param, [grad_out], None, Of.NORMS)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return self._congruence_of_samples(call, matrix, wrt) / call.batch_size

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL


STRETCH = PlainAutograd()
"""The rule of all stretches."""
