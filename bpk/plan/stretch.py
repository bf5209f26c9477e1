"""A stretch of plain autograd between two recorded calls, as a call: autograd itself is its rule.

The inputs are the outputs of the calls that feed the stretch, as their rules see them; the output is the tensor that
the next call reads. Parameters that functions use directly are parameters of the stretch, named by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bpk.jacobians.core.call import Call, Wrt, index_of
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.rows_through import RowsThrough, between_samples, materialised
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.probing import draw
from bpk.plan.broadcast import BroadcastRows
from bpk.plan.graph import Source
from bpk.plan.parts import in_parts
from bpk.plan.samples.rows import of_samples, over_batch

KEPT = 8
"""Up to how many times larger than columns rows of all parameters are kept with them."""


class StretchCall(Call):
    """The call of a stretch.

    `samples_of_rows` are those of the output's rows, `rows_of_inputs` those of each input's (`None`: rows are the
    samples); `samples` are those considered, if these are not all.
    """

    def __init__(
        self,
        source: Source,
        output: Tensor,
        inputs: Sequence[Tensor],
        samples_of_rows: Tensor | None,
        n: int,
        samples: tuple[int, ...] | None = None,
    ) -> None:
        params = {str(k): in_parts(p) for k, p in enumerate(source.trained)}
        super().__init__(None, inputs, params, output)
        self.source = source
        self.samples_of_rows = samples_of_rows
        self.rows_of_inputs: list[Tensor | None] = [None] * len(self.inputs)
        self.n = n
        self.samples = samples
        self.latest: tuple[Tensor, bool, Sequence[Tensor | RowsThrough]] | None = None
        self.small: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.broadcast: BroadcastRows | None = None

    @property
    def merged(self) -> bool:
        """Whether all rows are those of the only sample."""
        return self.n == 1 and self.samples_of_rows is not None

    @property
    def rows_of_all_inputs(self) -> Tensor | None:
        """The sample of each row of the inputs, of which samples have several, if those of all inputs are the same."""
        first, *others = self.rows_of_inputs or [None]
        alike = first is not None and all(x is not None and torch.equal(x, first) for x in others)
        return first if alike and not self.merged else None

    @property
    def batch_size(self) -> int:
        return self.output.shape[0] if self.samples is None else len(self.samples)

    def subset(self, samples: Sequence[int]) -> StretchCall:
        chosen = tuple(samples) if self.samples is None else tuple(self.samples[k] for k in samples)
        part = StretchCall(self.source, self.output, self.inputs, self.samples_of_rows, self.n, chosen)
        part.rows_of_inputs, part.broadcast = self.rows_of_inputs, self.broadcast
        return part

    def of_parameters(self, mat: Tensor, together: bool) -> Sequence[Tensor | RowsThrough]:
        """Columns at the output times the transposed Jacobian in each parameter, row by row `[V, R, *p]`.

        Autograd sums over rows, so it is asked for those of one sample after the other, and their sum is that of the
        first of them; `together`, once for the sum of all `[V, *p]`.
        All parameters are found at once, and kept for the next one that is asked for: as long as the columns, if rows
        are not much larger than these, else until others are asked for.
        """
        kept = self.small.get(mat)
        if kept is not None and kept[0] == together:
            return cast(Sequence[Tensor | RowsThrough], kept[1])
        if self.latest is None or self.latest[0] is not mat or self.latest[1] != together:
            self.latest = mat, together, self.source.pull_to_parameters(mat) if together else self.rows(mat)
            if sum(p.numel() for p in self.params.values()) <= KEPT * mat.shape[2:].numel():
                self.small[mat] = together, self.latest[2]
        return self.latest[2]

    def rows(self, mat: Tensor) -> list[Tensor | RowsThrough]:
        """Rows `[V, R, *p]` of all parameters: of those that are only spread in one pass, of others in one a sample."""
        if self.broadcast is None:
            self.broadcast = BroadcastRows(self.source, self.output, partial(draw, self.output.shape, mat[:0], 0))
        full = over_batch(mat, self.samples, self.output.shape[0])
        found = self.broadcast.rows(full)
        if self.samples is not None:
            found = {k: between_samples(x, index_of(self.samples, mat.device)) for k, x in found.items()}
        rest = [k for k in range(len(self.source.trained)) if k not in found]
        if rest:
            part = replace(self.source, trained=tuple(self.source.trained[k] for k in rest))
            places = self.places_by_sample(mat)
            each = [part.pull_to_parameters(at_rows(full, rows)) for rows, _ in places]
            first = torch.tensor([place for _, place in places], dtype=torch.long, device=mat.device)
            for number, k in enumerate(rest):
                zeros = mat.new_zeros(*mat.shape[:2], *self.params[str(k)].shape)
                sums = torch.stack([parts[number] for parts in each], 1) if places else zeros
                complete = len(places) == mat.shape[1] or not places
                found[k] = sums if complete else zeros.to(sums).index_copy(1, first, sums)
        return [found[k] for k in range(len(self.source.trained))]

    def places_by_sample(self, mat: Tensor) -> list[tuple[Tensor, int]]:
        """For every sample: its rows of the output, and the first of them among the columns' rows, in this order."""
        rows = torch.arange(mat.shape[1], device=mat.device)
        rows = rows if self.samples is None else index_of(self.samples, mat.device)
        if self.samples_of_rows is None:
            return [(row, k) for k, row in enumerate(rows.split(1) if len(rows) else ())]
        of = self.samples_of_rows[rows]
        return sorted([(rows[of == n], int((of == n).nonzero()[0])) for n in of.unique()], key=itemgetter(1))

    def rows_by_sample(self) -> list[list[Tensor]] | None:
        """For the output, then for each input: the rows of every sample (`None`: rows are the samples)."""
        found = [self.samples_of_rows, *self.rows_of_inputs]
        if all(samples is None for samples in found):
            return None
        each = [torch.arange(self.n, device="cpu") if samples is None else samples for samples in found]
        return [[(samples == k).nonzero()[:, 0] for k in range(self.n)] for samples in each]


def at_rows(mat: Tensor, rows: Tensor) -> Tensor:
    """Columns `[V, R, ...]` that are zero at all but some rows."""
    return torch.zeros_like(mat).index_copy(1, rows, mat.index_select(1, rows))


def whole_batch(call: Call, mat: Tensor) -> tuple[Source, Tensor]:
    """A stretch, and columns at its end as those of the whole batch."""
    assert isinstance(call, StretchCall)
    return call.source, over_batch(mat, call.samples, call.output.shape[0])


class PlainAutograd(Rule):
    """Products by autograd's own graph, which is alive during the backward pass only."""

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
        through = self.rows_through(call, mat, param)
        if through is None:
            return super().squared_sum(call, mat, param, weights, per_sample)
        return through.squares(weights, per_sample)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        n, out = call.batch_size, call.output.shape[1:]
        left = matrix.reshape(len(matrix), 1, *out).expand(-1, n, *[-1] * len(out))
        half = as_rows(self.jac_t_mat_prod(call, left, wrt, sum_batch=False), 2)
        right = half.permute(2, 1, 0).reshape(half.shape[2], n, *out)
        return as_rows(self.jac_t_mat_prod(call, right, wrt, sum_batch=False), 2).mean(1)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL


STRETCH = PlainAutograd()
"""The rule of all stretches."""
