"""Squares of weights that functions compute output by output: `g v / |v|`, standardised rows, a softmax over inputs.

The rows of a linear layer with one position are outer products `m_vn x_n^T`. Where an entry of a parameter gets
something from the entries of one output `o` alone, its row is `m_vno` times what comes of `x_n`, whatever the column:

    sum_v w_vn row_vn^2 = (sum_v w_vn m_vno^2) (J^T (1 x_n^T))^2.

So functions are passed by a row for each sample, and not by one for each column of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import slices, sum_of_squares
from bpk.jacobians.second_order.probing import SEED
from bpk.plan.broadcast import BASE, labels_of
from bpk.plan.row_products import ADJACENT, Weight
from bpk.plan.spread_rows import Arrived, SpreadRows, at_parameters
from bpk.plan.squared_rows import SquaredRows
from bpk.recording import engine

WORTH = 8
"""From how many rows saved on it pays to look for such parameters."""


class OutputSquares:
    """Squares of those parameters of a stretch of which that is so, from blocks of columns one after the other.

    There will be so many `columns` in all, of the `samples` asked for (`None`: of all).
    """

    def __init__(self, spread: SpreadRows, columns: int, samples: Tensor | None) -> None:
        self.spread, self.samples = spread, samples
        self.outputs: dict[Weight, dict[int, Tensor]] = {}
        """By function, and by number of the parameter: the output that each entry belongs to."""
        self.squares: dict[Weight, Tensor] = {}
        rows = spread.count if samples is None else len(samples)
        for use in spread.uses if (columns - 1) * rows >= WORTH else ():
            if isinstance(use, Weight) and use.has_outputs(spread.count) and (found := self.look_at(use)):
                self.outputs[use] = found

    @property
    def served(self) -> set[int]:
        """The numbers of these parameters."""
        return {k for found in self.outputs.values() for k in found}

    def look_at(self, use: Weight) -> dict[int, Tensor]:
        """The parameters that one function alone spreads, output by output."""
        spread = self.spread
        if use not in spread.outputs:
            mine = [k for k, uses in spread.places.items() if [each for each, _ in uses] == [use]]
            spread.outputs[use] = outputs_of(use, {k: spread.params[k] for k in mine}, spread.device)
        return spread.outputs[use]

    def add(self, arrived: Arrived, weights: Tensor | None) -> None:
        """Take what has come to the functions, with weights `[V, N]`."""
        for use in self.outputs:
            mat = arrived[use.node]
            if mat is not None:
                m = use.columns(mat)
                m = m if self.samples is None else m.index_select(1, self.samples)
                found = sum_of_squares(m, weights)
                self.squares[use] = self.squares[use] + found if use in self.squares else found

    def finish(self, totals: SquaredRows) -> None:
        """All columns were there: pass functions, and add squares up."""
        count = self.spread.count if self.samples is None else len(self.samples)
        for use, outputs in self.outputs.items():
            params = [self.spread.params[k] for k in outputs]
            squares = self.squares.get(use)
            if squares is None:  # nothing comes to the function
                none = {k: p.new_zeros(1, 0, *p.shape) for k, p in zip(outputs, params, strict=True)}
                totals.add(none, slice(0), None)
                continue
            ones = squares.new_ones(()).expand(1, *use.result)
            for here in slices(count, max(1, self.spread.room // self.spread.size)):
                some = here if self.samples is None else self.samples[here]
                rows = use.of_samples(ones, ADJACENT, self.spread.count, some)
                for (k, output), each in zip(outputs.items(), at_parameters(rows, use, params), strict=True):
                    totals.add_scaled(k, each[0], squares[here], output, here)


def outputs_of(use: Weight, params: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    """By number of the parameter: the output that each entry belongs to, where that is one.

    Numbers at the function's argument, of which none is zero by chance, are multiplied with powers of two that tell
    outputs from each other. What comes to an entry is multiplied with the same, exactly, if it is of one output.
    """
    found: dict[int, Tensor] = {}
    if not params or any(p.is_complex() for p in params.values()):
        return found
    kind = engine.kind_of_output(*use.start)[1] if use.start is not None else next(iter(params.values())).dtype
    if kind.is_complex:
        return found
    generator = torch.Generator().manual_seed(SEED)
    column = torch.rand((1, *use.shape), generator=generator, dtype=torch.float32, device="cpu").add_(0.5)
    column = column.to(device, kind)
    number = torch.arange(use.shape[use.output_axis], device=device)
    labels = [x if use.output_axis else x[:, None] for x in labels_of(len(number), column)]
    pulled = at_parameters(torch.stack([column, *(column * x for x in labels)], 1), use, list(params.values()))
    for k, each in zip(params, pulled, strict=True):
        output = decoded(each[0], len(number))
        if output is not None and output.dim() > 1 and output.numel():
            rows = output.flatten(1)[:, 0].reshape(-1, *[1] * (output.dim() - 1))
            output = rows if torch.equal(rows.expand_as(output), output) else output
        if output is not None:
            found[k] = output
    return found


def decoded(pulled: Tensor, count: int) -> Tensor | None:
    """The number that each entry belongs to, from a column and its tests; `None` if some belong to several."""
    column, *tests = pulled
    output, scale = torch.zeros(column.shape, dtype=torch.long, device=column.device), 1
    known = column != 0
    for test in tests:
        digit = torch.where(known, (test / column).abs().log2().round() + BASE // 2, 0.0).nan_to_num(-1, -1, -1)
        if not torch.equal(test, column * torch.exp2(digit - BASE // 2)) or bool(((digit < 0) | (digit >= BASE)).any()):
            return None
        output, scale = output + digit.long() * scale, scale * BASE
    return output if bool((output < count).all()) else None
