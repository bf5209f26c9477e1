"""A stretch of plain autograd between two recorded calls, as a call.

The inputs are the outputs of the calls that feed the stretch, as their rules see them; the output is the tensor that
the next call reads. Parameters that functions use directly are parameters of the stretch, named by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bpk.jacobians.core.call import Call, index_of
from bpk.jacobians.core.rows_through import RowsThrough, materialised
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.second_order.probing import draw
from bpk.plan.broadcast import BroadcastRows
from bpk.plan.by_output import OutputSquares
from bpk.plan.graph import Source
from bpk.plan.parts import in_parts
from bpk.plan.samples.rows import over_batch
from bpk.plan.squared_rows import Of, SquaredRows

KEPT = 8
"""Up to how many times larger than columns rows of all parameters are kept with them."""


JOINED = 1 << 22
"""How many numbers of columns are looked at together."""


class Squared(NamedTuple):
    """Sums of squares that were found for all parameters at once: of which columns, with which weights."""

    mats: Sequence[tuple[ref[Tensor], int]]
    weights: Tensor | None
    found: dict[str, Tensor]

    def are_of(self, name: str, mats: Sequence[Tensor], weights: Tensor | None) -> bool:
        """Whether that of a parameter is among them, which nobody has taken."""
        if name not in self.found or len(mats) != len(self.mats):
            return False
        pairs = zip(self.mats, mats, strict=True)
        if not all(known() is mat and version == mat._version for (known, version), mat in pairs):
            return False
        if weights is None or self.weights is None:
            return weights is self.weights
        return weights is self.weights or torch.equal(weights, self.weights)


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
        self.squared: dict[Of, Squared] = {}
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
        full = over_batch(mat, self.samples, self.output.shape[0])
        found = self.spread(mat).rows(full, None if self.samples is None else index_of(self.samples, mat.device))
        rest = [k for k in range(len(self.source.trained)) if k not in found]
        if rest:
            places = self.places_by_sample(mat)
            each = list(self.one_by_one(full, rest, [rows for rows, _ in places]))
            first = torch.tensor([place for _, place in places], dtype=torch.long, device=mat.device)
            for k in rest:
                zeros = mat.new_zeros(*mat.shape[:2], *self.params[str(k)].shape)
                sums = torch.stack([parts[k] for parts in each], 1) if places else zeros
                complete = len(places) == mat.shape[1] or not places
                found[k] = sums if complete else zeros.to(sums).index_copy(1, first, sums)
        return [found[k] for k in range(len(self.source.trained))]

    def spread(self, mat: Tensor) -> BroadcastRows:
        """The parameters that functions only spread, looked for once."""
        if self.broadcast is None:
            self.broadcast = BroadcastRows(self.source, self.output, partial(draw, self.output.shape, mat[:0], 0))
        return self.broadcast

    def one_by_one(self, full: Tensor, params: Sequence[int], places: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
        """Columns `[V, R, *out]` in parameters, by number, `[V, *p]`: those of the rows of one sample at a time."""
        part = replace(self.source, trained=tuple(self.source.trained[k] for k in params))
        for rows in places:
            yield dict(zip(params, part.pull_to_parameters(at_rows(full, rows)), strict=True))

    def squares(self, name: str, mats: Sequence[Tensor], weights: Tensor | None, of: Of) -> Tensor:
        """Sums of squared rows of a parameter, with weights `[V, R]`, from rows of some of them at a time.

        For norms, there is a single column `[R, *out]`, as it is.
        Those of all parameters are found at once, and kept for the others until these are asked for.
        """
        known = self.squared.get(of)
        if known is None or not known.are_of(name, mats, weights):
            kept = [(ref(mat), mat._version) for mat in mats]
            known = self.squared[of] = Squared(kept, weights, self.squares_of_all(mats, weights, of))
        return known.found.pop(name)

    def squares_of_all(self, mats: Sequence[Tensor], weights: Tensor | None, of: Of) -> dict[str, Tensor]:
        """The same of all parameters."""
        mats = [mat[None] for mat in mats] if of is Of.NORMS else mats
        totals, first, add_up = SquaredRows(of, mats[0].shape[1]), 0, self.adding_up()
        chosen = None if self.samples is None else index_of(self.samples, mats[0].device)
        broadcast = self.spread(mats[0])
        by_output = OutputSquares(broadcast.spread, sum(map(len, mats)), chosen)
        spread = broadcast.spread.without(by_output.served)
        rest = [k for k in range(len(self.source.trained)) if k not in broadcast.places]
        places = self.places_by_sample(mats[0]) if rest else []
        for mat in joined(mats):
            full, part = over_batch(mat, self.samples, self.output.shape[0]), slice(first, first + len(mat))
            scale, first = None if weights is None else weights[part], part.stop
            arrived = broadcast.pull(broadcast.spread.uses, full) if broadcast.places else {}
            by_output.add(arrived, scale)
            for columns, here, rows in spread.pieces(arrived, mat.dtype, chosen):
                totals.add(rows, here, None if scale is None else scale[columns, here])
                add_up(rows)
            for (_, n), found in zip(places, self.one_by_one(full, rest, (rows for rows, _ in places)), strict=True):
                rows = {k: x[:, None] for k, x in found.items()}
                totals.add(rows, slice(n, n + 1), None if scale is None else scale[:, n : n + 1])
                add_up(rows)
            if not places:
                totals.add({k: mat.new_zeros(len(mat), 0, *self.params[str(k)].shape) for k in rest}, slice(0), None)
        by_output.finish(totals)
        kinds = {k: torch.promote_types(mats[0].dtype, self.params[str(k)].dtype) for k in totals.totals}
        return {str(k): totals.result(k, kind) for k, kind in kinds.items()}

    def adding_up(self) -> Callable[[Mapping[int, Tensor | RowsThrough]], None]:
        """What adds up rows of a single column, if somebody wants their sum and nobody has it."""
        adders = {k: self.summing(str(k)) for k in range(len(self.params))} if self.sums is not None else {}
        wanted = {k: add for k, add in adders.items() if add is not None}

        def add_up(rows: Mapping[int, Tensor | RowsThrough]) -> None:
            for k, each in rows.items() if wanted else ():
                if k in wanted:
                    part = materialised(each)[0].sum(0)
                    wanted[k](part.to(torch.promote_types(part.dtype, self.params[str(k)].dtype)))

        return add_up

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


def joined(mats: Sequence[Tensor]) -> Iterator[Tensor]:
    """Blocks of columns one after the other, small ones together."""
    group: list[Tensor] = []
    for mat in mats:
        if group and sum(each.numel() for each in group) + mat.numel() > JOINED:
            yield concatenated(group)
            group = []
        group.append(mat)
    yield concatenated(group)


def at_rows(mat: Tensor, rows: Tensor) -> Tensor:
    """Columns `[V, R, ...]` that are zero at all but some rows."""
    return torch.zeros_like(mat).index_copy(1, rows, mat.index_select(1, rows))
